// The memory and the streams of the device `late`.
//
// Memory: every byte has two addresses in this process. Tensors carry the one that nobody may touch
// (PROT_NONE), so a host access is a SIGSEGV at any time, also while a kernel runs. Kernels use the
// other one, which `shadow` finds.
//
// Streams: nothing runs before somebody waits for it. Work stays in the queue of its stream until an
// event behind it is asked for the second time, or until something synchronises with the stream. So a
// missing wait is wrong every time, not only when the machine is busy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

namespace late {

constexpr int DEVICES = 2;
constexpr int ALIGNMENT = 16; // bytes; what kernels of attention demand of each row
constexpr int POLLS = 1;      // an event answers "not yet" so often before its work runs
constexpr int POISON = 0xFF;  // NaN in every floating dtype

using Task = std::function<void()>;

struct Stream {
  int device;
  std::int64_t id; // 0 is the default stream, which all threads share as CUDA's do
  std::deque<Task> tasks;
  std::uint64_t asked = 0, done = 0;
  int polls = POLLS;
};

struct Event {
  Stream* stream = nullptr; // none before it was recorded
  std::uint64_t point = 0;
  int polls = POLLS;
};

Stream* stream_of(int device, std::int64_t id);
Stream* new_stream(int device);
void add(Stream* stream, Task task);
void record(Event& event, Stream* stream);
void block(const Event& event, Stream* stream); // let a stream wait for an event
bool query(Event& event);
bool query(Stream* stream);
void run_all(Stream* stream); // to what was asked of it before this call
void run_to(Stream* stream, std::uint64_t point);
void run_device(int device); // all its streams; -1: of every device

void* allocate(std::size_t nbytes); // device memory
void release(void* pointer);
void* shadow(const void* pointer);      // where kernels find it; null for memory of the host
bool is_device(const void* pointer);    // whether the host must not touch it
void pin(void* pointer, std::size_t nbytes); // host memory of which copies are asynchronous
void unpin(const void* pointer);
bool is_pinned(const void* pointer);

} // namespace late
