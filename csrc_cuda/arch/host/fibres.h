// A thread block on the CPU: one fibre for each lane, switched at warp operations, copies and barriers in an order
// drawn from a seed, so that code which relies on an order that the device does not promise goes wrong here. Shared
// memory starts as NaN; asynchronous copies land as late as they may.
//
// Every image of the host is compiled with this: headers of the C library only, since those of the C++ library and what
// is instantiated from them took two thirds of each compilation.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp knows of one stack only

#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include "arch/host/list.h"
#include "kernels/platform.h"

namespace xattn::host {

struct Copy {
    u32 target;
    const void* source;  // null: 16 bytes of zero
};

// Numbers drawn from a seed: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
struct Random {
    u64 state;
    u64 operator()() {
        u64 x = state += 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
    }
};

// Lanes that act together: a warp (or wave), or the whole block.
struct Group {
    int size = 0, arrived = 0;
    u64 generation = 0;
    void** slots = nullptr;  // what each lane brings to an operation
};

// Memory for the stacks of all lanes of a block; the next block of a thread takes the same.
struct Stacks {
    static constexpr size_t kBytes = 256 << 10;
    char* memory = nullptr;
    size_t count = 0;
    char* of(size_t lane) { return memory + lane * kBytes; }
    void provide(size_t lanes) {
        if (lanes <= count) return;
        delete[] memory;
        memory = new char[lanes * kBytes];
        count = lanes;
    }
    ~Stacks() { delete[] memory; }
};

// It begins as a context; from then on jumps lead there and back, which unlike swapcontext ask nothing of the kernel.
struct Fibre {
    ucontext_t context{};
    jmp_buf place;
    int index = 0;
    bool begun = false, done = false;
    const Group* waits_for = nullptr;
    u64 generation = 0;
    List<Copy> copies;    // asynchronous, not landed, the oldest first
    List<size_t> groups;  // where each group that is closed ends in it
};

class Block {
  public:
    Block(int threads, int warp_size, u32 shared_bytes, u64 seed)
        : shared_(shared_bytes),
          random_{seed},
          warp_size_(warp_size),
          fibres_(threads),
          warps_((threads + warp_size - 1) / warp_size),
          slots_(2 * warps_.size() * warp_size) {
        memset(shared_.begin(), 0xff, shared_.size());
        all_.size = threads;
        all_.slots = slots_.begin();
        for (size_t w = 0; w < warps_.size(); ++w) {
            warps_[w].size = warp_size;
            warps_[w].slots = slots_.begin() + (warps_.size() + w) * warp_size;
        }
    }

    // Runs `body` in every lane of block `index`. What went wrong, or "".
    template <class Body>
    const char* run(u32 index, const Body& body) {
        block_index = index;
        call_ = [](const void* body) { (*static_cast<const Body*>(body))(); };
        body_ = &body;
        stacks.provide(fibres_.size());
        for (size_t i = 0; i < fibres_.size(); ++i) {
            Fibre& f = fibres_[i];
            f.index = int(i);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stacks.of(i);
            f.context.uc_stack.ss_size = Stacks::kBytes;
            makecontext(&f.context, reinterpret_cast<void (*)()>(&Block::enter), 0);
        }
        Block* outer = current;
        current = this;
        run_lanes();
        current = outer;
        return error_;
    }

    // Called in every lane of a group; `act` runs once, in the lane that comes last, and sees what each brought in
    // `slots`.
    template <class Act>
    void together(Group& group, int lane, void* brought, Act&& act) {
        Fibre* self = fibre;
        group.slots[lane] = brought;
        if (++group.arrived == group.size) {
            act(group.slots);
            group.arrived = 0;
            ++group.generation;
            return;
        }
        self->waits_for = &group;
        self->generation = group.generation;
        if (!_setjmp(self->place)) _longjmp(scheduler_, 1);
        self->waits_for = nullptr;
    }
    template <class Act>
    void in_warp(void* brought, Act&& act) {
        together(warps_[fibre->index / warp_size_], fibre->index % warp_size_, brought, act);
    }
    void barrier() {
        together(all_, fibre->index, nullptr, [](auto&) {});
    }

    u8* at(u32 address, u32 bytes) {
        if (u64(address) + bytes > shared_.size() || address % min_of<u32>(bytes, 16) != 0) {
            snprintf(error_, sizeof(error_), "shared memory: access of %u bytes at %u of %zu", bytes, address,
                     shared_.size());
            static u8 nowhere[16];
            return nowhere;
        }
        return shared_.begin() + address;
    }

    void copy_async(u32 target, const void* source) { fibre->copies.push_back({target, source}); }
    void copy_commit() { fibre->groups.push_back(fibre->copies.size()); }
    void copy_wait(size_t open) {
        Fibre& f = *fibre;
        if (f.groups.size() <= open) return;
        const size_t closed = f.groups.size() - open, landed = f.groups[closed - 1];
        for (size_t n = 0; n < landed; ++n) {
            const Copy& c = f.copies[n];
            u8* to = at(c.target, 16);
            if (c.source)
                memcpy(to, c.source, 16);
            else
                memset(to, 0, 16);
        }
        f.copies.drop(landed);
        f.groups.drop(closed);
        for (size_t& end : f.groups) end -= landed;
    }

    static thread_local Block* current;
    Fibre* fibre = nullptr;
    u32 block_index = 0;

  private:
    void run_lanes() {
        List<Fibre*> ready;
        for (size_t left = fibres_.size(); left > 0;) {
            ready.clear();
            for (Fibre& f : fibres_)
                if (!f.done && !(f.waits_for && f.waits_for->generation == f.generation)) ready.push_back(&f);
            if (ready.size() == 0) {
                snprintf(error_, sizeof(error_), "deadlock: some lanes of a group wait for others that do not come");
                return;
            }
            // A few lanes in a random order, then look again: cheaper than one at a time, and as unfair.
            const size_t turns = 1 + random_() % ready.size();
            for (size_t n = 0; n < turns; ++n) {
                const size_t drawn = n + random_() % (ready.size() - n);
                fibre = ready[drawn];
                ready[drawn] = ready[n];
                resume();
                if (fibre->done) --left;
                if (error_[0]) return;
            }
        }
    }
    static void enter() {
        Block* block = current;
        block->call_(block->body_);
        block->fibre->done = true;
        _longjmp(block->scheduler_, 1);
    }
    // Goes on with `fibre` until it waits or is done.
    void resume() {
        if (_setjmp(scheduler_)) return;
        if (fibre->begun) _longjmp(fibre->place, 1);
        fibre->begun = true;
        setcontext(&fibre->context);
    }

    static thread_local Stacks stacks;

    List<u8> shared_;
    Random random_;
    int warp_size_;
    List<Fibre> fibres_;
    List<Group> warps_;
    Group all_;
    List<void*> slots_;
    jmp_buf scheduler_;
    void (*call_)(const void* body) = nullptr;
    const void* body_ = nullptr;
    char error_[128] = "";
};

inline thread_local Block* Block::current = nullptr;
inline thread_local Stacks Block::stacks;

}  // namespace xattn::host
