// A row of values that grows: what the fibres need of std::vector, at a small part of the compiler's time.
#pragma once

#include <stddef.h>

namespace xattn::host {

template <class T>
class List {
  public:
    List() = default;
    explicit List(size_t size) : at_(new T[size]()), size_(size), room_(size) {}
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    ~List() { delete[] at_; }

    size_t size() const { return size_; }
    T* begin() { return at_; }
    T* end() { return at_ + size_; }
    T& operator[](size_t n) { return at_[n]; }

    void push_back(const T& x) {
        if (size_ == room_) {
            room_ = 2 * room_ + 16;
            T* wider = new T[room_];
            for (size_t n = 0; n < size_; ++n) wider[n] = at_[n];
            delete[] at_;
            at_ = wider;
        }
        at_[size_++] = x;
    }
    void clear() { size_ = 0; }
    // Without the first `count`.
    void drop(size_t count) {
        for (size_t n = count; n < size_; ++n) at_[n - count] = at_[n];
        size_ -= count;
    }

  private:
    T* at_ = nullptr;
    size_t size_ = 0, room_ = 0;
};

}  // namespace xattn::host
