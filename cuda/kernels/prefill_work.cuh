// prefill_work.cuh: what prefill_plan says to paged_prefill_hopper.cu of items that are cut.
#include "common.cuh"

constexpr int HOPPER_TILE = 128;  // keys

// Items past the last full round of the grid lie on a line, tile after tile from their diagonal backwards, which is cut
// into pieces. So a piece has the end of an item, then whole ones, then the beginning of one; or less. The last piece is
// taken first, by the block that is first through what is not cut, and is the largest
struct PrefillPieces {
  int whole;      // items before: not cut
  int count;      // of pieces
  int slope;      // tiles that the last piece has more than an even share, and the first one less
  int total;      // tiles of all
  __device__ __forceinline__ int begin(int piece) const {  // on the line
    return piece * total / count - (slope ? slope * piece * (count - piece) / (count - 1) : 0);
  }
  // Behind it: of each piece, item and its tiles in pieces before
  __device__ __forceinline__ int2* starts() { return (int2*)(this + 1); }
  __device__ __forceinline__ const int2* starts() const { return (const int2*)(this + 1); }
};
