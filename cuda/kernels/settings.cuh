// settings.cuh: what the device knows of how a row samples. model/sampler.py says what it means.
#include "common.cuh"

struct Settings {  // of a row; cuda/scatter.py has the same fields (SETTINGS)
  u64 seed;
  double top_p, typical_p;
  u64 least_mass;                    // floor(min_p * 2^40)
  int* history;                      // its tokens by position, or null
  const int* lists;                  // what adjust.cu applies, or null
  float temperature, repetition, presence, frequency;
  int top_k;
  int log_probs;                     // likeliest tokens that it asks for; -1: nothing
  int prompt;                        // tokens of the prompt
  int min_tokens;
  int adjusts;                       // whether adjust.cu has anything to do
  int unused[3];
};
static_assert(sizeof(Settings) == 96);
