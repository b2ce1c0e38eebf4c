// Writes new tokens into a paged cache and rotates keys and queries, in one launch ahead of the attention.
//
// Blocks [0, new_tokens * new_parts) each take a part of one new token, those behind them a part of one query. A part
// is a run of units, each of 8 elements of a head (of one, where something does not lie at multiples of 16 bytes).
// Besides, the launch's threads share the sequences: their lengths with the new tokens, and what is wrong with them.
//
// Whatever the device's index tensors hold, nothing is written but slots of the cache that the page table names, and
// nothing is read outside the tensors: a token without a place in the cache is dropped and reported.
//
// Rounding is that of torch's operations in float32 (xattn/rotary.py, xattn/paging.py): products and sums of a rotation
// each for itself, its result to the element, and then a quotient by the scale to the cache's. A cache of 8 bits holds
// what is nearest to the quotient, and its largest number for larger ones.
#pragma once

#include "kernels/fp8.h"
#include "kernels/paging.h"
#include "kernels/params.h"

namespace xattn {

// The parameter block of the append kernels; the host side packs the same fields (xattn/launch_params.py).
struct AppendParams {
    Operand k_cache, v_cache;  // (page, slot, head, head_dim)
    Operand k_new, v_new;      // (batch, token, head, head_dim), packed (token, head, head_dim); null: none
    Operand q, q_out;          // likewise; null: no query is rotated

    const void* page_table;  // (batch, pages of a sequence)
    s64 page_table_stride;
    const void* seqlens_k;       // (batch,): tokens in the cache before the new ones
    const void* cu_seqlens_new;  // (batch + 1,); null: as many new tokens of each sequence
    const void* cu_seqlens_q;
    void* lengths;  // (batch,): seqlens_k and the new tokens, in the type of seqlens_k; null: not wanted
    s32* status;

    const void* cos;  // (positions, width): of the rotation; null: none
    const void* sin;
    s64 cos_stride, sin_stride;
    const float* k_scale;  // divide new keys and values; null: 1
    const float* v_scale;
    s64 k_scale_batch_stride, k_scale_head_stride, v_scale_batch_stride, v_scale_head_stride;

    s32 index64;  // bit 0: cu_seqlens_q, bit 1: cu_seqlens_new, bit 2: seqlens_k, bit 3: page_table hold 64-bit numbers
    s32 batch;
    s32 heads_q, heads_kv;
    s32 head_dim, head_dim_v;
    s32 num_pages;
    Divisor page_size;
    s32 room;  // tokens that a row of the page table has room for

    s32 appends;                 // 0: there is nothing but queries to rotate
    s32 new_tokens, q_tokens;    // in all
    Divisor new_each, q_each;    // of a sequence, where they are not packed
    Divisor new_parts, q_parts;  // blocks of a token
    s32 positions, width;        // rows of the tables, and pairs that are rotated
    s32 interleaved;             // 1: pairs are (2 i, 2 i + 1), 0: (i, i + width)
    s32 narrow_tables;           // 1: cos and sin hold elements, 0: float32
    s32 causal;                  // 1: queries at negative positions count as at 0
};

template <class Arch, class Config>
struct Append {
    using Element = typename Config::Element;
    using Cache = typename Config::Cache;  // the Element, or of 8 bits
    using Table = PageTableOf<AppendParams>;
    static constexpr bool kNarrow = sizeof(Cache) == 1;
    static constexpr int kThreads = 4 * Arch::kWarpSize;
    static constexpr int kSharedBytes = 0;

    XATTN_DEVICE static void run(const AppendParams& p, typename Arch::Shared) {
        const u32 block = Arch::block_index(), blocks = u32(p.new_tokens) * p.new_parts.value;
        const u32 turning = u32(p.q_tokens) * p.q_parts.value, all = max_of(blocks + turning, 1u) * kThreads;
        for (u32 b = block * kThreads + Arch::thread_index(); b < u32(p.batch); b += all) sequence(p, s32(b));
        if (block < blocks)
            append(p, block);
        else if (block - blocks < turning)
            rotate(p, block - blocks);
    }

  private:
    // ---- lengths and positions, of whatever is there: numbers so large that they mean nothing are cut short
    XATTN_DEVICE static s64 number(const void* data, bool wide, s64 i) {
        constexpr s64 most = s64(1) << 40;
        return max_of(-most, min_of(index_at(data, wide, i), most));
    }
    XATTN_DEVICE static s64 length(const AppendParams& p, s32 b) { return number(p.seqlens_k, p.index64 & 4, b); }
    XATTN_DEVICE static s64 new_of(const AppendParams& p, s32 b) {
        if (!p.cu_seqlens_new) return p.new_tokens ? p.new_each.value : 0;
        const bool wide = p.index64 & 2;
        return number(p.cu_seqlens_new, wide, b + 1) - number(p.cu_seqlens_new, wide, b);
    }

    XATTN_DEVICE static void sequence(const AppendParams& p, s32 b) {
        const s64 before = length(p, b), after = before + new_of(p, b), most = 0x7fffffff;
        if (p.lengths && p.index64 & 4)
            static_cast<s64*>(p.lengths)[b] = after;
        else if (p.lengths)
            static_cast<s32*>(p.lengths)[b] = s32(max_of(-most, min_of(after, most)));
        if (!p.appends) return;
        if (before < 0) report(p, Status::seqlens_k);
        if (!p.cu_seqlens_new) return;
        const bool wide = p.index64 & 2;
        const s64 start = index_at(p.cu_seqlens_new, wide, b), end = index_at(p.cu_seqlens_new, wide, b + 1);
        if (end < start || (b == 0 && start != 0) || (b == p.batch - 1 && end > p.new_tokens))
            report(p, Status::cu_seqlens);
    }
    XATTN_DEVICE static void report(const AppendParams& p, Status what) { p.status[int(what)] = 1; }

    // Where a token belongs.
    struct Token {
        s32 sequence, index;  // its number in the sequence's part of the tensor
        s64 start;            // row of the tensor where that part begins
        bool exists;
    };
    XATTN_DEVICE static Token token(const AppendParams& p, const void* offsets, bool wide, const Divisor& each, s32 n) {
        if (!offsets) {
            const s32 sequence = s32(quotient(u32(n), each));
            return {sequence, n - sequence * s32(each.value), 0, true};
        }
        // How many sequences end at or ahead of it.
        s32 low = 0, high = p.batch;
        while (low < high) {
            const s32 middle = (low + high) / 2;
            if (index_at(offsets, wide, middle + 1) <= n)
                low = middle + 1;
            else
                high = middle;
        }
        const bool exists = low < p.batch && n >= index_at(offsets, wide, 0);
        const s64 start = number(offsets, wide, min_of(low, p.batch - 1));
        return {low, exists ? s32(max_of<s64>(-kFar, min_of<s64>(n - start, kFar))) : 0, start, exists};
    }
    static constexpr s64 kFar = 0x3fffffff;

    // ---- rotation
    struct Angle {
        s64 cos, sin;  // where the position's row begins in the tables
        bool backward, on;
        XATTN_DEVICE static Angle of(const AppendParams& p, s64 position) {
            Angle a{0, 0, position < 0, p.cos && p.positions > 0};
            if (!p.cos) return a;
            const bool outside = position >= p.positions || position <= -s64(p.positions);
            if (outside) report(p, Status::rotary);
            const s64 row = outside ? 0 : position < 0 ? -position : position;
            a.cos = row * p.cos_stride, a.sin = row * p.sin_stride;
            return a;
        }
    };

    template <int n>
    struct Unit {  // n elements side by side, as bits
        u16 x[n];
        XATTN_DEVICE static Unit at(const u16* from) {
            Unit u;
            if constexpr (n == 8) {
                u32 words[4];
                Arch::load_global(words, from);
                XATTN_UNROLL
                for (int i = 0; i < n; ++i) u.x[i] = u16(words[i / 2] >> (16 * (i % 2)));
            } else {
                u.x[0] = *from;
            }
            return u;
        }
        XATTN_DEVICE void store(u16* to) const {
            if constexpr (n == 8) {
                u32 words[4];
                XATTN_UNROLL
                for (int i = 0; i < 4; ++i) words[i] = u32(x[2 * i]) | u32(x[2 * i + 1]) << 16;
                Arch::store_global(to, words);
            } else {
                *to = x[0];
            }
        }
    };
    // m numbers of a table from `at` on.
    template <int m>
    XATTN_DEVICE static void read(float (&x)[m], const AppendParams& p, const void* table, s64 at) {
        if constexpr (m == 1) {
            x[0] = p.narrow_tables ? widened(static_cast<const u16*>(table)[at]) : static_cast<const float*>(table)[at];
        } else {
            if (p.narrow_tables) {
                const u32* words = static_cast<const u32*>(table) + at / 2;
                XATTN_UNROLL
                for (int i = 0; i < m; ++i) x[i] = widened(u16(words[i / 2] >> (16 * (i % 2))));
            } else {
                XATTN_UNROLL
                for (int i = 0; i < m; i += 4) {
                    float four[4];
                    Arch::load_global(four, static_cast<const float*>(table) + at + i);
                    XATTN_UNROLL
                    for (int j = 0; j < 4; ++j) x[i + j] = four[j];
                }
            }
        }
    }

    // The unit at column `col` of a row, rotated.
    template <int n>
    XATTN_DEVICE static Unit<n> turned(const AppendParams& p, const u16* row, s32 col, const Angle& angle) {
        Unit<n> own = Unit<n>::at(row + col);
        if (!angle.on || col >= 2 * p.width) return own;
        float cos[n], sin[n], other[n];
        bool second;  // of its pair; of a unit of interleaved pairs that goes by the element
        if (p.interleaved) {
            constexpr int pairs = (n + 1) / 2;
            float c[pairs], s[pairs];
            read(c, p, p.cos, angle.cos + col / 2);
            read(s, p, p.sin, angle.sin + col / 2);
            second = n == 1 && col % 2;
            XATTN_UNROLL
            for (int i = 0; i < n; ++i) {
                cos[i] = c[i / 2], sin[i] = s[i / 2];
                other[i] = widened(n == 1 ? row[col ^ 1] : own.x[n == 1 ? 0 : i ^ 1]);
            }
        } else {
            second = col >= p.width;
            const s32 at = second ? col - p.width : col;
            read(cos, p, p.cos, angle.cos + at);
            read(sin, p, p.sin, angle.sin + at);
            const Unit<n> partner = Unit<n>::at(row + (second ? at : col + p.width));
            XATTN_UNROLL
            for (int i = 0; i < n; ++i) other[i] = widened(partner.x[i]);
        }
        float result[n];
        XATTN_UNROLL
        for (int i = 0; i < n; ++i) {
            const bool adds = second || (p.interleaved && i % 2);
            const float part = Arch::product(other[i], angle.backward ? -sin[i] : sin[i]);
            const float whole = Arch::product(widened(own.x[i]), cos[i]);
            result[i] = adds ? part + whole : whole - part;
        }
        return packed(result);
    }
    XATTN_DEVICE static float widened(u16 bits) { return Arch::template to_float<Element>(bits); }
    template <int n>
    XATTN_DEVICE static Unit<n> packed(const float (&x)[n]) {
        Unit<n> u;
        XATTN_UNROLL
        for (int i = 0; i < n; i += 2) {
            const u32 word = Arch::template pack<Element>(x[i], x[i + 1 < n ? i + 1 : i]);
            u.x[i] = u16(word);
            if (i + 1 < n) u.x[i + 1] = u16(word >> 16);
        }
        return u;
    }

    // ---- whether rows can be taken in units of 8
    template <class T = Element>
    XATTN_DEVICE static bool whole(const Operand& x, s32 cols) {
        const u64 strides = u64(x.batch_stride | x.row_stride | x.head_stride) * sizeof(T);
        return ((reinterpret_cast<u64>(x.data) | strides | u64(cols) * sizeof(T)) & (8 * sizeof(T) - 1)) == 0;
    }
    XATTN_DEVICE static bool whole_tables(const AppendParams& p) {
        const u64 size = p.narrow_tables ? 2 : 4, strides = u64(p.cos_stride | p.sin_stride) * size;
        const u64 at = reinterpret_cast<u64>(p.cos) | reinterpret_cast<u64>(p.sin);
        return !p.cos || (((at | strides) & 15) == 0 && p.width % (p.interleaved ? 4 : 8) == 0);
    }

    // ---- the two kinds of blocks
    XATTN_DEVICE static void append(const AppendParams& p, u32 block) {
        const u32 n = quotient(block, p.new_parts), part = block - n * p.new_parts.value;
        const Token t = token(p, p.cu_seqlens_new, p.index64 & 2, p.new_each, s32(n));
        if (!t.exists) return;
        const s64 position = length(p, t.sequence) + t.index;
        const bool has_room = position >= 0 && position < p.room;
        if (!has_room) report(p, Status::no_room);
        const Angle angle = p.num_pages > 0 && p.room > 0 ? Angle::of(p, position) : Angle{0, 0, false, false};
        if (!has_room) return;
        const typename Table::Place place = Table::of(p, t.sequence).at(s32(position));
        if (place.page < 0) return;
        const bool chunks = whole<Cache>(p.k_cache, p.head_dim) && whole(p.k_new, p.head_dim) && whole_tables(p) &&
                            (!p.v_new.data || (whole<Cache>(p.v_cache, p.head_dim_v) && whole(p.v_new, p.head_dim_v)));
        const s32 row = p.cu_seqlens_new ? s32(n) : t.index;
        if (chunks)
            write<8>(p, t.sequence, row, place, angle, part);
        else
            write<1>(p, t.sequence, row, place, angle, part);
    }
    template <int n>
    XATTN_DEVICE static void write(const AppendParams& p, s32 sequence, s32 row, const typename Table::Place& place,
                                   const Angle& angle, u32 part) {
        const u32 each_k = p.head_dim / n, each_v = p.head_dim_v / n, of_k = p.heads_kv * each_k;
        const u32 units = of_k + (p.v_new.data ? p.heads_kv * each_v : 0);
        for (u32 u = part * kThreads + Arch::thread_index(); u < units; u += p.new_parts.value * kThreads) {
            const bool is_v = u >= of_k;
            const u32 index = is_v ? u - of_k : u, each = is_v ? each_v : each_k, head = index / each;
            const s32 col = s32(index - head * each) * n;
            const Operand &from = is_v ? p.v_new : p.k_new, &to = is_v ? p.v_cache : p.k_cache;
            const u16* source = row_of(from, p.cu_seqlens_new ? 0 : sequence, row, head);
            Cache* target = row_of<Cache>(to, place.page, place.slot, head) + col;
            const Unit<n> x = is_v ? Unit<n>::at(source + col) : turned<n>(p, source, col, angle);
            const float* scale = is_v ? p.v_scale : p.k_scale;
            if (scale) {
                const s64 at = is_v ? sequence * p.v_scale_batch_stride + head * p.v_scale_head_stride
                                    : sequence * p.k_scale_batch_stride + head * p.k_scale_head_stride;
                scale += at;
            }
            if (kNarrow || scale)
                store(target, x, scale);
            else
                x.store(reinterpret_cast<u16*>(target));
        }
    }
    // Divided by the scale, where there is one, and rounded to the cache's numbers.
    template <int n>
    XATTN_DEVICE static void store(Cache* target, const Unit<n>& x, const float* scale) {
        float y[n];
        XATTN_UNROLL
        for (int i = 0; i < n; ++i) {
            y[i] = widened(x.x[i]);
            if (scale) y[i] = Arch::exact_quotient(y[i], *scale);
        }
        if constexpr (kNarrow) {
            u64 all = 0;
            XATTN_UNROLL
            for (int i = 0; i < n; ++i) all |= u64(Arch::template rounded<Cache>(y[i])) << (8 * i);
            if constexpr (n == 8)
                *reinterpret_cast<u64*>(target) = all;
            else
                target->bits = u8(all);
        } else {
            packed(y).store(reinterpret_cast<u16*>(target));
        }
    }

    XATTN_DEVICE static void rotate(const AppendParams& p, u32 block) {
        const u32 n = quotient(block, p.q_parts), part = block - n * p.q_parts.value;
        const Token t = token(p, p.cu_seqlens_q, p.index64 & 1, p.q_each, s32(n));
        s64 position = 0;
        if (t.exists) {
            s64 count = p.q_each.value;
            if (p.cu_seqlens_q) count = number(p.cu_seqlens_q, p.index64 & 1, t.sequence + 1) - t.start;
            position = length(p, t.sequence) + new_of(p, t.sequence) - count + t.index;
        }
        if (p.causal) position = max_of<s64>(position, 0);
        const Angle angle = Angle::of(p, position);
        const s32 sequence = p.cu_seqlens_q ? 0 : t.sequence, row = p.cu_seqlens_q ? s32(n) : t.index;
        if (whole(p.q, p.head_dim) && whole(p.q_out, p.head_dim) && whole_tables(p))
            turn<8>(p, sequence, row, angle, part);
        else
            turn<1>(p, sequence, row, angle, part);
    }
    template <int n>
    XATTN_DEVICE static void turn(const AppendParams& p, s32 sequence, s32 row, const Angle& angle, u32 part) {
        const u32 each = p.head_dim / n;
        for (u32 u = part * kThreads + Arch::thread_index(); u < p.heads_q * each; u += p.q_parts.value * kThreads) {
            const u32 head = u / each;
            const s32 col = s32(u - head * each) * n;
            turned<n>(p, row_of(p.q, sequence, row, head), col, angle)
                .store(row_of(p.q_out, sequence, row, head) + col);
        }
    }

    template <class T = u16>
    XATTN_DEVICE static T* row_of(const Operand& x, s32 sequence, s32 row, u32 head) {
        return static_cast<T*>(x.data) + sequence * x.batch_stride + row * x.row_stride + s64(head) * x.head_stride;
    }
};

}  // namespace xattn
