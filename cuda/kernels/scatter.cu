// scatter: spread one step's upload over the arrays that live on the device, before everything else of the step.
//
//   upload [words] int32: 16 words of header, then sections at the word offsets that the header names (cuda/scatter.py)
//     0 step  1 sequences S  2 tokens  3 decodes  4 table changes  5 settings  6 result slot  7 likeliest
//     8 rows [S]  9 starts [S]  10 query_starts [S + 1]  11 samples [S]  12 token_ids [tokens]
//     13 changes: rows, pages, frames      14 settings: a row and its SETTING_WORDS words each
//     15 copies: sources, targets (page_copy reads these)
// Written:
//   page_tables [R, max_pages] and settings [R, SETTING_WORDS] (settings.cuh), from the changes
//   sequences [7, sequence_stride], per sequence, padded to `padded_sequences`:
//     0 rows (-1)  1 lengths (0), after this step  2 decode_lengths (0 also where the sequence is no decode)
//     3 prefill_tokens (0 also where it is one)  4 samples (0)  5 last_query (0), index of its last token
//     6 query_starts, one entry more
//   tokens [3, token_stride], per token, padded to `padded_tokens`: 0 ids (0)  1 positions (0)  2 rows (-1)
// A token id of -1 is the one that the row sampled last: last_tokens [R].
// Any grid: threads take elements in turn.
#include "settings.cuh"

constexpr int SETTING_WORDS = sizeof(Settings) / 4;

extern "C" __global__ void __launch_bounds__(256) scatter(
    const int* __restrict__ upload, int* page_tables, int* settings, int* sequences, int* tokens,
    const int* last_tokens, int max_pages, int sequence_stride, int token_stride, int padded_sequences,
    int padded_tokens) {
  const int S = upload[1], T = upload[2], decodes = upload[3], changes = upload[4], changed_rows = upload[5];
  const int* const rows = upload + upload[8];
  const int* const starts = upload + upload[9];
  const int* const query_starts = upload + upload[10];
  const int first = blockIdx.x * 256 + threadIdx.x, stride = gridDim.x * 256;
  for (int i = first; i < changes; i += stride) {
    const int* change = upload + upload[13] + i;
    page_tables[(i64)change[0] * max_pages + change[changes]] = change[2 * changes];
  }
  for (int i = first; i < changed_rows * SETTING_WORDS; i += stride) {
    const int* entry = upload + upload[14] + i / SETTING_WORDS * (1 + SETTING_WORDS);
    settings[(i64)entry[0] * SETTING_WORDS + i % SETTING_WORDS] = entry[1 + i % SETTING_WORDS];
  }
  for (int s = first; s <= padded_sequences; s += stride) {
    int* const out = sequences + s;
    out[6 * sequence_stride] = s < S ? query_starts[s] : T;
    if (s == padded_sequences) continue;
    const bool real = s < S;
    const int count = real ? query_starts[s + 1] - query_starts[s] : 0, length = real ? starts[s] + count : 0;
    out[0] = real ? rows[s] : -1;
    out[1 * sequence_stride] = length;
    out[2 * sequence_stride] = s < decodes ? length : 0;
    out[3 * sequence_stride] = s < decodes ? 0 : count;
    out[4 * sequence_stride] = real ? upload[upload[11] + s] : 0;
    out[5 * sequence_stride] = real ? query_starts[s + 1] - 1 : 0;
  }
  for (int t = first; t < padded_tokens; t += stride) {
    int id = 0, position = 0, row = -1;
    if (t < T) {
      int low = 0, high = S;  // the sequence that holds token t
      while (high - low > 1) {
        const int middle = (low + high) >> 1;
        if (query_starts[middle] <= t) low = middle;
        else high = middle;
      }
      row = rows[low];
      position = starts[low] + t - query_starts[low];
      id = upload[upload[12] + t];
      if (id < 0) id = last_tokens[row];
    }
    tokens[t] = id;
    tokens[token_stride + t] = position;
    tokens[2 * token_stride + t] = row;
  }
}
