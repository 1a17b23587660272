#include "runtime.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace late {
namespace {

constexpr std::size_t ARENA = std::size_t{4} << 30; // bytes of the memory of this process
constexpr std::size_t BLOCK = 512;                  // bytes; CUDA's allocations begin so far apart

struct Range {
  std::size_t nbytes;
  char* shadow;
  bool is_device; // else memory of the host that was registered
};

std::recursive_mutex running;           // held by whoever carries out tasks
std::mutex memory_lock;                 // never held while a task runs
std::map<char*, Range> ranges;          // by what tensors carry
std::map<char*, std::size_t> unused, used; // blocks of the arena
std::map<char*, std::size_t> pinned;
std::map<std::pair<int, std::int64_t>, std::unique_ptr<Stream>> streams;
char* arena = nullptr;
int arena_file = -1;

// Map a file twice: where nobody may look, and where kernels look.
char* map_twice(int file, std::size_t offset, std::size_t nbytes) {
  auto map = [&](int protection) {
    void* place = mmap(nullptr, nbytes, protection, MAP_SHARED, file, offset);
    return place == MAP_FAILED ? nullptr : static_cast<char*>(place);
  };
  char *closed = map(PROT_NONE), *open = map(PROT_READ | PROT_WRITE);
  if (closed && open) {
    ranges[closed] = {nbytes, open, true};
    return closed;
  }
  return nullptr;
}

// The entry of a map from the beginnings of ranges in which an address lies, or its end.
template <class Map, class Size>
auto entry(Map& map, const void* pointer, Size size) {
  auto place = const_cast<char*>(static_cast<const char*>(pointer));
  auto after = map.upper_bound(place);
  if (after == map.begin()) return map.end();
  auto found = std::prev(after);
  return place < found->first + size(found->second) ? found : map.end();
}

auto range_of(const void* pointer) {
  return entry(ranges, pointer, [](const Range& range) { return range.nbytes; });
}

std::size_t rounded(std::size_t nbytes, std::size_t to) {
  return (std::max<std::size_t>(nbytes, 1) + to - 1) / to * to;
}

} // namespace

// ---- streams

Stream* stream_of(int device, std::int64_t id) {
  std::lock_guard lock(running);
  auto& made = streams[{device, id}];
  if (!made) made.reset(new Stream{device, id});
  return made.get();
}

Stream* new_stream(int device) {
  std::lock_guard lock(running);
  return stream_of(device, static_cast<std::int64_t>(streams.size()) + 1);
}

void add(Stream* stream, Task task) {
  std::lock_guard lock(running);
  stream->tasks.push_back(std::move(task));
  stream->asked++;
}

void run_to(Stream* stream, std::uint64_t point) {
  std::vector<Task> finished; // what they hold goes when the lock is free: that may need Python's
  std::lock_guard lock(running);
  while (stream->done < point) {
    finished.push_back(std::move(stream->tasks.front()));
    stream->tasks.pop_front();
    finished.back()();
    stream->done++;
  }
  stream->polls = POLLS;
}

void run_all(Stream* stream) {
  std::uint64_t point;
  {
    std::lock_guard lock(running);
    point = stream->asked;
  }
  run_to(stream, point);
}

void run_device(int device) {
  std::vector<Stream*> chosen;
  {
    std::lock_guard lock(running);
    for (auto& [key, stream] : streams)
      if (device < 0 || key.first == device) chosen.push_back(stream.get());
  }
  for (Stream* stream : chosen) run_all(stream);
}

void record(Event& event, Stream* stream) {
  std::lock_guard lock(running);
  event = {stream, stream->asked, POLLS};
}

void block(const Event& event, Stream* stream) {
  if (event.stream && event.stream != stream)
    add(stream, [other = event.stream, point = event.point] { run_to(other, point); });
}

static bool asked(Stream* stream, std::uint64_t point, int& polls) {
  {
    std::lock_guard lock(running);
    if (stream->done >= point) return true;
    if (polls-- > 0) return false;
  }
  run_to(stream, point);
  return true;
}

bool query(Event& event) {
  return !event.stream || asked(event.stream, event.point, event.polls);
}

bool query(Stream* stream) {
  return asked(stream, stream->asked, stream->polls);
}

// ---- memory

void* allocate(std::size_t nbytes) {
  std::lock_guard lock(memory_lock);
  if (!arena) {
    arena_file = memfd_create("late", MFD_CLOEXEC);
    if (arena_file < 0 || ftruncate(arena_file, ARENA)) throw std::runtime_error("late: no memory");
    arena = map_twice(arena_file, 0, ARENA);
    if (!arena) throw std::runtime_error("late: its memory cannot be mapped");
    unused[arena] = ARENA;
  }
  nbytes = rounded(nbytes, BLOCK);
  for (auto [place, size] : unused) {
    if (size < nbytes) continue;
    unused.erase(place);
    if (size > nbytes) unused[place + nbytes] = size - nbytes;
    used[place] = nbytes;
    return place;
  }
  throw std::runtime_error("late: out of memory");
}

void release(void* pointer) {
  std::lock_guard lock(memory_lock);
  auto found = used.find(static_cast<char*>(pointer));
  if (found == used.end()) throw std::runtime_error("late: this memory is not allocated");
  auto [here, done] = unused.insert(*found);
  used.erase(found);
  auto next = std::next(here);
  if (next != unused.end() && here->first + here->second == next->first) {
    here->second += next->second;
    unused.erase(next);
  }
  if (here != unused.begin()) {
    auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      unused.erase(here);
    }
  }
}

void* shadow(const void* pointer) {
  std::lock_guard lock(memory_lock);
  auto found = range_of(pointer);
  if (found == ranges.end()) return nullptr;
  return found->second.shadow + (static_cast<const char*>(pointer) - found->first);
}

bool is_device(const void* pointer) {
  std::lock_guard lock(memory_lock);
  auto found = range_of(pointer);
  return found != ranges.end() && found->second.is_device;
}

void pin(void* pointer, std::size_t nbytes) {
  std::lock_guard lock(memory_lock);
  pinned[static_cast<char*>(pointer)] = nbytes;
}

void unpin(const void* pointer) {
  std::lock_guard lock(memory_lock);
  pinned.erase(const_cast<char*>(static_cast<const char*>(pointer)));
}

bool is_pinned(const void* pointer) {
  std::lock_guard lock(memory_lock);
  auto size = [](std::size_t nbytes) { return nbytes; };
  return entry(pinned, pointer, size) != pinned.end();
}

} // namespace late

// ---- what a host access looks like

namespace {

struct sigaction before;

void on_fault(int, siginfo_t* info, void*) {
  auto found = late::range_of(info->si_addr); // without a lock: this thread may hold it
  if (found != late::ranges.end() && found->second.is_device) {
    char text[160];
    int length = snprintf(
        text, sizeof text, "\nlate: the host touched device memory at %p. Copy it first (`.cpu()`).\n",
        info->si_addr);
    if (write(2, text, length) < 0) _exit(139);
  }
  sigaction(SIGSEGV, &before, nullptr); // the access is made again, and the next handler sees it
}

} // namespace

// ---- the calls of CUDA's runtime that sp_core makes, under their names

extern "C" {

// Report host accesses. Call this after `faulthandler.enable()`, whose report follows ours.
void late_report_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

int late_devices() { return late::DEVICES; }

// Count pieces of memory of so many bytes: allocated here, opened from other processes, registered.
int late_blocks(std::size_t least) {
  std::lock_guard lock(late::memory_lock);
  int count = 0;
  for (auto& [place, nbytes] : late::used) count += nbytes >= least;
  for (auto& [place, range] : late::ranges) count += range.nbytes >= least;
  return count;
}

enum { SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, MISALIGNED = 716 };

struct Handle { // of 64 bytes
  int process, file;
  std::size_t offset, nbytes;
  char rest[40];
};

const char* cudaGetErrorString(int code) {
  return code == NO_MEMORY ? "out of memory" : code == INVALID ? "invalid argument" : "no error";
}

int cudaGetLastError() { return SUCCESS; }

int cudaMalloc(void** pointer, std::size_t nbytes) try {
  *pointer = late::allocate(late::rounded(nbytes, sysconf(_SC_PAGESIZE)) + sysconf(_SC_PAGESIZE));
  return SUCCESS;
} catch (const std::exception&) {
  return NO_MEMORY;
}

int cudaFree(void* pointer) try {
  late::run_device(-1);
  late::release(pointer);
  return SUCCESS;
} catch (const std::exception&) {
  return INVALID;
}

int cudaIpcGetMemHandle(Handle* handle, void* pointer) {
  std::lock_guard lock(late::memory_lock);
  auto found = late::used.find(static_cast<char*>(pointer));
  if (found == late::used.end()) return INVALID;
  std::size_t offset = found->first - late::arena;
  *handle = {getpid(), late::arena_file, offset, found->second, {}};
  return SUCCESS;
}

int cudaIpcOpenMemHandle(void** pointer, Handle handle, unsigned) {
  if (handle.process == getpid()) return INVALID; // as CUDA says
  auto path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return INVALID;
  std::lock_guard lock(late::memory_lock);
  std::size_t page = sysconf(_SC_PAGESIZE), inside = handle.offset % page;
  char* place = late::map_twice(file, handle.offset - inside, inside + handle.nbytes);
  close(file);
  *pointer = place + inside;
  return place ? SUCCESS : NO_MEMORY;
}

int cudaIpcCloseMemHandle(void* pointer) {
  late::run_device(-1);
  std::lock_guard lock(late::memory_lock);
  auto found = late::range_of(pointer);
  if (found == late::ranges.end() || found->first == late::arena) return INVALID;
  munmap(found->second.shadow, found->second.nbytes);
  munmap(found->first, found->second.nbytes);
  late::ranges.erase(found);
  return SUCCESS;
}

int cudaHostRegister(void* pointer, std::size_t nbytes, unsigned) {
  late::pin(pointer, nbytes);
  std::lock_guard lock(late::memory_lock);
  auto place = static_cast<char*>(pointer);
  late::ranges[place] = {nbytes, place, false};
  return SUCCESS;
}

int cudaHostUnregister(void* pointer) {
  late::run_device(-1);
  late::unpin(pointer);
  std::lock_guard lock(late::memory_lock);
  return late::ranges.erase(static_cast<char*>(pointer)) ? SUCCESS : INVALID;
}

// Between any memory, as cudaMemcpyDefault says. Pageable memory is read now, or written now.
int cudaMemcpyAsync(void* into, const void* part, std::size_t nbytes, int, late::Stream* stream) {
  auto reached = [](const void* place) { return late::shadow(place) || late::is_pinned(place); };
  void *to = late::shadow(into), *from = late::shadow(part);
  to = to ? to : into;
  from = from ? from : const_cast<void*>(part);
  std::shared_ptr<std::vector<char>> staged;
  if (!reached(part)) {
    auto bytes = static_cast<const char*>(part);
    staged = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
    from = staged->data();
  }
  late::add(stream, [to, from, nbytes, staged] { std::memmove(to, from, nbytes); });
  if (!reached(into)) late::run_all(stream);
  return SUCCESS;
}

} // extern "C"
