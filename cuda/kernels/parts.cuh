// parts.cuh: scan.cu and weigh.cu look at a row in parts, a block for each, on the grid (parts, S).
#include "sampling.cuh"

constexpr int AT_ONCE = 4;               // quads of a thread under way
constexpr int CANDIDATES_OF_PART = 1536;
