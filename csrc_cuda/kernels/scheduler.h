// Which tile a thread block works on. Tiles are (row block, head, sequence); heads of all sequences are taken in
// sections whose keys and values fit the L2 cache together. Within a section row blocks are the outer loop, the longest
// first where the mask makes them differ.
#pragma once

#include "kernels/params.h"

namespace xattn {

struct Tile {
    s32 m_block;
    s32 head;
    s32 sequence;
};

// A launch has fewer than 2^31 tiles. Params: what has the fields of ForwardParams that are read here.
template <class Params>
XATTN_DEVICE Tile tile_at(const Params& p, u32 index) {
    const u32 section = quotient(index, p.section_tiles);
    const u32 rest = index - section * p.section_tiles.value;
    const u32 first = section * p.section_heads.value;
    const bool whole = first + p.section_heads.value <= u32(p.sequences) * p.heads_q;
    const Divisor& width = whole ? p.section_heads : p.last_heads;
    const u32 block = quotient(rest, width);
    const u32 head = first + rest - block * width.value;
    const u32 sequence = quotient(head, p.heads);
    const bool bounded_right = p.causal || p.window_right >= 0;
    return {s32(bounded_right ? p.m_blocks - 1 - block : block), s32(head - sequence * p.heads_q), s32(sequence)};
}

}  // namespace xattn
