// Dropout: which weights are kept, by logical position; the map from positions to random numbers is that of
// xattn/rng.py, which says what it is and why. Nothing is stored: backward has the same numbers again.
//
// Where rows are queries, a lane holds all eight numbers of an evaluation over 64 keys, so that none is made twice
// (drop). Where rows are keys (backward_keys.h), or fewer than 64 keys are at hand at a time, it does not: the threads
// of a block make the numbers of a tile together, and lay down a bit for each weight in shared memory (KeptTile).
#pragma once

#include "kernels/params.h"

namespace xattn {

// Philox4x32 with 7 rounds, for one call.
struct Dropout {
    u32 low, high;  // the key
    u32 threshold;  // numbers below it are dropped; 16 bits, in the upper half

    struct Words {
        u32 x[4];
        XATTN_DEVICE u32 at(int n) const { return n & 2 ? n & 1 ? x[3] : x[2] : n & 1 ? x[1] : x[0]; }
    };

    XATTN_DEVICE static Dropout of(const ForwardParams& p) {
        const u64 key = u64(p.dropout_rng[0]) + u64(p.dropout_rng[1]) * 0x9e3779b97f4a7c15ull;
        return {u32(key), u32(key >> 32), p.dropout_threshold};
    }

    // Of the keys 2 n, 2 n + 1 in each 16 of 64, in the order of the sixteens: `group` is 8 * (key / 64) + n. A word
    // holds the number of the even key in its lower half, that of the odd one in its upper half.
    XATTN_DEVICE Words numbers(s32 group, s32 q_idx, s32 sequence, s32 head) const {
        u32 c0 = u32(group), c1 = u32(q_idx), c2 = u32(sequence), c3 = u32(head), k0 = low, k1 = high;
        XATTN_UNROLL
        for (int round = 0; round < 7; ++round) {
            const u64 a = u64(c0) * 0xd2511f53u, b = u64(c2) * 0xcd9e8d57u;
            c0 = u32(b >> 32) ^ c1 ^ k0, c1 = u32(b);
            c2 = u32(a >> 32) ^ c3 ^ k1, c3 = u32(a);
            k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
        }
        return {{c0, c1, c2, c3}};
    }
    XATTN_DEVICE bool keeps_even(u32 word) const { return word << 16 >= threshold; }
    XATTN_DEVICE bool keeps_odd(u32 word) const { return word >= threshold; }

    // The query and head of a lane's row.
    struct Row {
        s32 q_idx, head;
    };

    // Weights of 16 * kKeyGroups keys, from `key0` on, that are dropped become 0. The number of keys divides `key0`.
    template <class Arch, class Accumulator, int kKeyGroups>
    XATTN_DEVICE void drop(Accumulator (&w)[kKeyGroups], const Row (&rows)[Arch::kRowsPerLane], s32 sequence, s32 key0,
                           int lane) const {
        constexpr int kShared = kKeyGroups % 4 == 0 ? 4 : kKeyGroups % 2 == 0 ? 2 : 1;  // groups of an evaluation
        XATTN_UNROLL
        for (int first = 0; first < kKeyGroups; first += kShared) {
            const s32 key = key0 + first * 16;
            const int word = kShared == 4 ? 0 : (key >> 4) & 3;
            XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                if (Arch::col_slot(e) % 2 != 0) continue;
                const Row& row = rows[Arch::row_slot(e)];
                // What the rounds do to the key is computed each time: there are no registers for it.
                const Dropout here{Arch::fresh_uniform(low), Arch::fresh_uniform(high), threshold};
                const Words words = here.numbers((key >> 6) * 8 + (Arch::col_of(lane, e) >> 1), Arch::fresh(row.q_idx),
                                                 sequence, row.head);
                XATTN_UNROLL
                for (int n = 0; n < kShared; ++n) {
                    const u32 x = words.at(word + n);
                    if (!keeps_even(x)) w[first + n].x[e] = 0.0f;
                    if (!keeps_odd(x)) w[first + n].x[e + 1] = 0.0f;
                }
            }
        }
    }
};

// A bit for each weight of kQueries rows and of all keys of the blocks of 64 that hold kKeys: 1 where it is kept. A
// byte holds what one evaluation gives: bit 2 * (key / 16 % 4) + key % 2 of byte (8 * block + key / 2 % 8, query).
template <class Arch, int kThreads, int kQueries, int kKeys>
struct KeptTile {
    using Shared = typename Arch::Shared;
    static constexpr int kGroups = (kKeys + 63) / 64 * 8;
    static constexpr int kPitch = kQueries + 8;  // lanes read eight groups at once, from different banks
    static constexpr int bytes = kGroups * kPitch;
    static_assert(kQueries % 8 == 0, "words of four queries");

    // Every thread of the block takes part. `key0` lies in the first block.
    XATTN_DEVICE static void fill(Shared at, const Dropout& dropout, s32 sequence, s32 head, s32 row0, s32 key0,
                                  int thread) {
        for (int i = 0; i < kGroups * kQueries; i += kThreads) {
            const int query = (i + thread) % kQueries, group = (i + thread) / kQueries;
            if (kGroups * kQueries % kThreads != 0 && group >= kGroups) break;
            const Dropout::Words words = dropout.numbers((key0 >> 6) * 8 + group, row0 + query, sequence, head);
            u32 kept = 0;
            XATTN_UNROLL
            for (int n = 0; n < 4; ++n) {
                kept |= u32(dropout.keeps_even(words.x[n])) << (2 * n);
                kept |= u32(dropout.keeps_odd(words.x[n])) << (2 * n + 1);
            }
            Arch::store_byte(at + group * kPitch + query, kept);
        }
    }

    // Bit 0: whether the weight of a query and of key `key` of a group of 16 keys is kept, the groups counted from the
    // first block; bit 1: the same of the next key, where this one is even; bit 2: of the group behind, where that is
    // in the same block; bit 8: of the next query, where this one is even.
    XATTN_DEVICE static u32 bits(Shared tile, int query, int sixteen, int key) {
        const Shared at = tile + ((sixteen >> 2) * 8 + (key >> 1)) * kPitch + (query & ~3);
        return Arch::load_word(at) >> (8 * (query & 3) + 2 * (sixteen & 3) + (key & 1));
    }
};

}  // namespace xattn
