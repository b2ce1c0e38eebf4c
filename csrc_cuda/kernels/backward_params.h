// The parameter block of the backward kernels: that of the forward call, and the tensors that a backward has more. The
// host side packs the same fields in the same order (xattn/launch_params.py).
#pragma once

#include "kernels/params.h"

namespace xattn {

// The order in which tiles of keys are worked on, under the names that scheduler.h reads: "rows" are keys, heads those
// of k and v, a row block is a tile of keys.
struct KeyTiles {
    s32 m_blocks;
    s32 sequences;  // batch, and where k is packed one more: the rows behind the last offset
    s32 heads_q;    // heads_kv
    s32 causal, window_right;
    Divisor section_tiles, section_heads, last_heads, heads;
};

struct BackwardParams {
    ForwardParams p;  // of the forward call; `lse` is read
    Operand dout, dq, dk, dv;
    const float* dlse;  // as lse; null: no gradient comes through it
    float* delta;       // as lse: of each row the sum of dout * out, less dlse; 0 where the row sees no key
    float scale;        // softmax_scale: of a product in a score
    s32 part;           // where dk and dv are made by different blocks, which: 0 both, 1 dv, 2 dk
    KeyTiles keys;
};

}  // namespace xattn
