// A thread block on the CPU: one fibre for each lane, switched at warp operations, copies and barriers in an order
// drawn from a seed, so that code which relies on an order that the device does not promise goes wrong here. Shared
// memory starts as NaN; asynchronous copies land as late as they may.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp knows of one stack only

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/platform.h"

namespace xattn::host {

struct Copy {
    u32 target;
    const void* source;  // null: 16 bytes of zero
};

// Lanes that act together: a warp (or wave), or the whole block.
struct Group {
    int size = 0, arrived = 0;
    u64 generation = 0;
    std::vector<void*> slots;  // what each lane brings to an operation
};

// It begins as a context; from then on jumps lead there and back, which unlike swapcontext ask nothing of the kernel.
struct Fibre {
    ucontext_t context{};
    jmp_buf place;
    int index = 0;
    bool begun = false, done = false;
    const Group* waits_for = nullptr;
    u64 generation = 0;
    std::vector<std::vector<Copy>> copies{1};  // the last group is open
};

class Block {
  public:
    static constexpr size_t kStack = 256 << 10;

    Block(int threads, int warp_size, u32 shared_bytes, u64 seed)
        : shared_(shared_bytes),
          random_(seed),
          warp_size_(warp_size),
          fibres_(threads),
          warps_((threads + warp_size - 1) / warp_size) {
        std::memset(shared_.data(), 0xff, shared_.size());
        all_.size = threads;
        all_.slots.resize(threads);
        for (auto& w : warps_) w.size = warp_size, w.slots.resize(warp_size);
    }

    // Runs `body` in every lane of block `index`.
    void run(u32 index, const std::function<void()>& body) {
        block_index = index;
        body_ = &body;
        for (size_t i = 0; i < fibres_.size(); ++i) {
            Fibre& f = fibres_[i];
            f = Fibre{};
            f.index = int(i);
            if (stacks.size() <= i) stacks.emplace_back(new char[kStack]);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stacks[i].get();
            f.context.uc_stack.ss_size = kStack;
            makecontext(&f.context, reinterpret_cast<void (*)()>(&Block::enter), 0);
        }
        Block* outer = current;
        current = this;
        std::vector<Fibre*> ready;
        for (size_t left = fibres_.size(); left > 0;) {
            ready.clear();
            for (Fibre& f : fibres_)
                if (!f.done && !(f.waits_for && f.waits_for->generation == f.generation)) ready.push_back(&f);
            if (ready.empty()) {
                current = outer;
                throw std::runtime_error("deadlock: some lanes of a group wait for others that do not come");
            }
            // A few lanes in a random order, then look again: cheaper than one at a time, and as unfair.
            std::shuffle(ready.begin(), ready.end(), random_);
            const size_t turns = 1 + random_() % ready.size();
            for (size_t n = 0; n < turns; ++n) {
                fibre = ready[n];
                resume();
                if (fibre->done) --left;
                if (!error_.empty()) {
                    current = outer;
                    throw std::runtime_error(error_);
                }
            }
        }
        current = outer;
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
            error_ = "shared memory: access of " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
                     " of " + std::to_string(shared_.size());
            static u8 nowhere[16];
            return nowhere;
        }
        return shared_.data() + address;
    }

    void copy_async(u32 target, const void* source) { fibre->copies.back().push_back({target, source}); }
    void copy_commit() { fibre->copies.emplace_back(); }
    void copy_wait(size_t open) {
        auto& groups = fibre->copies;
        while (groups.size() - 1 > open) {
            for (const Copy& c : groups.front()) {
                u8* to = at(c.target, 16);
                if (c.source)
                    std::memcpy(to, c.source, 16);
                else
                    std::memset(to, 0, 16);
            }
            groups.erase(groups.begin());
        }
    }

    static thread_local Block* current;
    Fibre* fibre = nullptr;
    u32 block_index = 0;

  private:
    static void enter() {
        Block* block = current;
        (*block->body_)();
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

    static thread_local std::vector<std::unique_ptr<char[]>> stacks;  // of the lanes of whatever block runs

    std::vector<u8> shared_;
    std::mt19937_64 random_;
    int warp_size_;
    std::vector<Fibre> fibres_;
    std::vector<Group> warps_;
    Group all_;
    jmp_buf scheduler_;
    const std::function<void()>* body_ = nullptr;
    std::string error_;
};

inline thread_local Block* Block::current = nullptr;
inline thread_local std::vector<std::unique_ptr<char[]>> Block::stacks;

}  // namespace xattn::host
