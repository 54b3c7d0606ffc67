// prefill_items.cuh: what blocks of paged_prefill_hopper.cu take one after the other, and where it comes from.
#include "prefill_work.cuh"

constexpr int ROWS = 128, TILE = HOPPER_TILE, TILE_PAGES = TILE / PAGE_SIZE;

struct __align__(16) Item {  // or a piece of one. tiles 0: there is no more work
  int tiles, last_tile, table, kv_head;  // table: place of its first page in the page tables
  int first_token, tokens, cached;       // of its sequence; shared_prefix: tokens are members
  int block_token, block_head;           // of its first row: token of the sequence, and which head of the group
  int pages;                             // that its rows see
  int first_part, parts;  // shared_prefix: of the first member, of each. Else the parts that others have of the item
  int own_part;           // where a piece that does not begin its item leaves its part; -1: it begins it
};

// Where items come from, of all kv heads together. One thread takes them, and has what lies in `left`
struct Left {
  int item = 0, done = 0, tiles = 0, piece = 0;  // of the piece it is at: the next item and the tiles of it before
  bool has_begun = false;
};

// A block's first item is that of its number, so that it is there before the kernel in front has ended; what follows goes
// to who comes first. A block waits for parts of items with smaller numbers, so for blocks that began before
struct CausalWork {
  const int* rows;
  const int* lengths;
  const int* query_starts;
  const int2* work;
  const int* work_count;
  const PrefillPieces* pieces;
  u32* counters;

  __device__ __forceinline__ Item take(Left& left, int group, int kv_heads, int max_pages) const {
    Item item = {};
    bool is_piece = left.tiles > 0;
    if (!is_piece) {
      u32 next = blockIdx.x;
      if (left.has_begun) {
        wait_for_previous_kernel();
        next = gridDim.x + atomicAdd(counters, 1u);
      }
      left.has_begun = true;
      const u32 whole = pieces->whole, count = pieces->count;
      if (next >= whole + count) {
        wait_for_previous_kernel();
        if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) counters[0] = counters[1] = 0;  // for the next launch
        return item;
      }
      left.item = next;
      left.done = 0;
      is_piece = next >= whole;
      if (is_piece) {  // from the last on: a block waits for parts of pieces that were taken before its own only
        left.piece = count - 1 - (next - whole);
        const int2 start = pieces->starts()[left.piece];
        left.item = start.x;
        left.done = start.y;
        left.tiles = pieces->begin(left.piece + 1) - pieces->begin(left.piece);
      }
    }
    const int total = work_count[0];
    item.kv_head = left.item / total;
    const int2 block = work[left.item - item.kv_head * total];
    item.block_token = block.y * ROWS / group;
    item.block_head = block.y * ROWS - item.block_token * group;
    item.first_token = query_starts[block.x];
    item.tokens = query_starts[block.x + 1] - item.first_token;
    item.cached = lengths[block.x] - item.tokens;
    item.pages = pages_of(item.cached + min((block.y * ROWS + ROWS - 1) / group, item.tokens - 1) + 1);
    item.table = rows[block.x] * max_pages;
    item.tiles = (item.pages + TILE_PAGES - 1) / TILE_PAGES;
    item.own_part = -1;
    if (is_piece) {
      const int mine = min(item.tiles - left.done, left.tiles), behind = item.tiles - left.done - mine;
      if (left.done) item.own_part = left.piece;
      item.first_part = left.piece + 1;
      while (behind && item.first_part + item.parts < pieces->count) {  // pieces that go on with it
        if (pieces->starts()[item.first_part + item.parts].x != left.item) break;
        ++item.parts;
      }
      item.tiles = mine;
      item.last_tile = behind;
      left.tiles -= mine;
      left.done = 0;
      ++left.item;
    }
    return item;
  }
};
struct SharedWork {
  const int* work;
  const int* members;
  float* parts;

  // In turn, without a counter: the list is even, and nothing of the launch before need have ended
  __device__ __forceinline__ Item take(Left& left, int group, int kv_heads, int max_pages) const {
    Item item = {};
    const int total = work[0], next = blockIdx.x + left.item++ * gridDim.x;
    if (next < total * kv_heads) {
      item.kv_head = next / total;
      const int* const entry = work + 4 + (next - item.kv_head * total) * 8;
      item.table = entry[0] * max_pages + entry[1];
      item.pages = entry[2];
      item.first_token = entry[3];
      item.tokens = entry[4];
      item.block_token = entry[5] * ROWS / group;
      item.block_head = entry[5] * ROWS - item.block_token * group;
      item.first_part = entry[6];
      item.parts = entry[7];
      item.tiles = (item.pages + TILE_PAGES - 1) / TILE_PAGES;
    }
    return item;
  }
};
