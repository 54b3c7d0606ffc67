// parts.cuh: weigh.cu looks at a row in parts, a block for each, on the grid (parts, S).
#include "sampling.cuh"

constexpr int CANDIDATES_OF_PART = 1536;
