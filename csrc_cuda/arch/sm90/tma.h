// Hopper's asynchronous copies and what orders them: TMA, mbarriers, named barriers, register hand-over. PTX ISA.
#pragma once

#include "kernels/platform.h"

namespace xattn {

// A tensor as cuTensorMapEncodeTiled describes it; xattn/launch.py has it written into the parameter block.
struct alignas(64) TensorMap {
    u64 word[16];
};

// A barrier in shared memory whose phase ends when all expected arrivals and bytes are there.
struct Barrier {
    u32 address;

    XATTN_DEVICE void init(u32 arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
    }
    XATTN_DEVICE void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    XATTN_DEVICE void arrive_and_expect(u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    XATTN_DEVICE void wait(u32 parity) const {
        u32 done;
        do {
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(address), "r"(parity)
                : "memory");
        } while (!done);
    }
};

// A place in a ring of `stages` buffers, and the parity of its barrier's phase; turned: it begins a phase later. For a
// power of two one register holds both.
template <u32 stages, bool is_power = (stages & (stages - 1)) == 0>
class Ring {
  public:
    XATTN_DEVICE explicit Ring(u32 turned = 0) : count_(turned * stages) {}
    XATTN_DEVICE u32 stage() const { return count_ % stages; }
    XATTN_DEVICE u32 parity() const { return count_ / stages & 1; }
    XATTN_DEVICE void next() { ++count_; }
    XATTN_DEVICE void back() { --count_; }

  private:
    u32 count_;
};

template <u32 stages>
class Ring<stages, false> {
  public:
    XATTN_DEVICE explicit Ring(u32 turned = 0) : stage_(0), parity_(turned) {}
    XATTN_DEVICE u32 stage() const { return stage_; }
    XATTN_DEVICE u32 parity() const { return parity_; }
    XATTN_DEVICE void next() {
        if (++stage_ == stages) stage_ = 0, parity_ ^= 1;
    }
    XATTN_DEVICE void back() {
        if (stage_ == 0) stage_ = stages, parity_ ^= 1;
        --stage_;
    }

  private:
    u32 stage_, parity_;
};

XATTN_DEVICE void make_barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Plain writes to shared memory become visible to wgmma and TMA.
XATTN_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

XATTN_DEVICE void tma_load(u32 target, const TensorMap* map, Barrier barrier, s32 col, s32 row, s32 head,
                           s32 sequence) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(target),
        "l"(map), "r"(barrier.address), "r"(col), "r"(row), "r"(head), "r"(sequence)
        : "memory");
}
// Consecutive bytes, a multiple of 16 of them at multiples of 16.
XATTN_DEVICE void bulk_load(u32 target, const void* source, u32 bytes, Barrier barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier.address)
        : "memory");
}
XATTN_DEVICE void tma_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

XATTN_DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
XATTN_DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements as ldmatrix reads them; a lane gives the address of a row.
XATTN_DEVICE void stmatrix(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The same, each matrix turned: a lane gives the address of what is a column of the registers.
XATTN_DEVICE void stmatrix_turned(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Adds four numbers to memory, in no order that others could rely on.
XATTN_DEVICE void add_to_global(float* to, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

XATTN_DEVICE void store_shared(u32 address, u32 a, u32 b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

template <int n>
XATTN_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
XATTN_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// True in one lane of a full warp.
XATTN_DEVICE bool elected() {
    u32 is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
    return is;
}

}  // namespace xattn
