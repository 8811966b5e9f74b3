// Weight tables: what is open is found, nothing else is, and nobody reads what is closed. For
// native_check.cpp.

// The arrays of a table: entry (row, column) begins with a number of the table's, of the row's and column's.
struct Table {
  size_t rows, columns;
  uint64_t handle = 0;
  std::vector<Buffer<int32_t>> memory;

  Table(Random& random, int32_t number) : rows(random.in(1, 4)), columns(random.in(1, 5)) {
    std::vector<Array> arrays;
    for (size_t i = 0; i < rows * columns; i++) {
      memory.emplace_back(3);
      int32_t* const data = memory.back().data();
      data[0] = number, data[1] = static_cast<int32_t>(i / columns),
      data[2] = static_cast<int32_t>(i % columns);
      Array array;
      array.data = data, array.type = Type::kS32, array.rank = 1, array.dims[0] = array.count = 3;
      arrays.push_back(array);
    }
    handle = open_table(std::move(arrays), rows);
  }
  // What is done with memory that no kernel reads any more.
  void spoil() {
    for (Buffer<int32_t>& each : memory) memset(each.data(), 0xff, 12);
  }
};

// Whether a table of such a number is read as it is; exits where it is read as something else.
bool reads(uint64_t handle, int64_t row, size_t column, int32_t number) {
  TableRow found;
  if (!found.open(handle, row)) return false;
  const Array* const array = found.at(column);
  if (!array) return false;
  const int32_t* const data = array->as<int32_t>();
  const int32_t expected[] = {number, static_cast<int32_t>(row), static_cast<int32_t>(column)};
  for (size_t i = 0; i < 3; i++) {
    if (data[i] != expected[i])
      fail("another array is read", static_cast<size_t>(row), i, data[i], expected[i], 0);
  }
  return true;
}

// Opens and closes in any order; wrong handles, rows and columns find nothing.
void check_tables(Random& random) {
  shape = "tables";
  if (open_table({}, 0) || open_table({}, 1) || open_table(std::vector<Array>(3), 2))
    fail("a table without rows or with part of one is opened", 0, 0, 0, 0, 0);
  std::vector<Table> open;
  std::vector<uint64_t> closed;
  for (int32_t number = 0; number < 60; number++) {
    if (open.size() < 12 && random.below(3)) {
      open.emplace_back(random, number);
      for (const Table& each : open) {
        if (!each.handle || (&each != &open.back() && each.handle == open.back().handle))
          fail("a handle is given twice", 0, 0, 0, 0, 0);
      }
      for (uint64_t each : closed) {
        if (each == open.back().handle) fail("a handle of a closed table is given again", 0, 0, 0, 0, 0);
      }
    } else if (!open.empty()) {
      const size_t at = random.below(open.size());
      if (!close_table(open[at].handle)) fail("an open table cannot be closed", at, 0, 0, 0, 0);
      open[at].spoil();
      closed.push_back(open[at].handle);
      std::swap(open[at], open.back());
      open.pop_back();
    }
    for (Table& each : open) {
      const int32_t own = each.memory[0].data()[0];
      for (size_t row = 0; row < each.rows + 2; row++) {
        for (size_t column = 0; column < each.columns + 2; column++) {
          const bool there = row < each.rows && column < each.columns;
          if (reads(each.handle, static_cast<int64_t>(row), column, own) != there)
            fail("a row or a column is wrong", row, column, !there, there, 0);
        }
      }
      const int64_t far[] = {-1, INT64_MIN, INT64_MAX, INT32_MAX};
      if (reads(each.handle, far[random.below(4)], 0, own)) fail("a row is out of range", 0, 0, 0, 0, 0);
      if (reads(each.handle, 0, SIZE_MAX, own)) fail("a column is out of range", 0, 0, 0, 0, 0);
      // Another generation, or no slot.
      const uint64_t one = uint64_t{1} << 32;
      for (uint64_t wrong : {each.handle + one, each.handle - one, each.handle & 0xffffffff,
                             each.handle | 0xffff0000, uint64_t{0}, ~uint64_t{0}}) {
        if (wrong == each.handle) continue;
        TableRow found;
        if (found.open(wrong, 0)) fail("a wrong handle finds a table", 0, 0, 0, 0, 0);
        if (close_table(wrong)) fail("a wrong handle closes a table", 0, 0, 0, 0, 0);
      }
    }
    for (uint64_t each : closed) {
      TableRow found;
      if (found.open(each, 0) || close_table(each)) fail("a closed table is found", 0, 0, 0, 0, 0);
    }
  }
  for (const Table& each : open) close_table(each.handle);
}

// As many as there are, each of its own; one that is closed makes room for one.
void check_many_tables() {
  shape = "many tables";
  Array array;
  array.type = Type::kS32;
  std::vector<uint64_t> handles;
  while (const uint64_t handle = open_table(std::vector<Array>(1, array), 1)) handles.push_back(handle);
  if (handles.size() != 4096) fail("the number of tables is wrong", 0, 0, handles.size(), 4096, 0);
  if (!close_table(handles[77])) fail("an open table cannot be closed", 0, 0, 0, 0, 0);
  const uint64_t again = open_table(std::vector<Array>(1, array), 1);
  if (!again || again == handles[77]) fail("a place is not used again", 0, 0, 0, 0, 0);
  if (open_table(std::vector<Array>(1, array), 1)) fail("there is a table too many", 0, 0, 0, 0, 0);
  handles[77] = again;
  for (uint64_t each : handles) close_table(each);
}

// Readers of some slots, while tables are opened there, closed and spoilt: for the thread sanitizer. A reader
// finds the table of its handle, or none.
void check_tables_at_once(uint64_t seed) {
  shape = "tables at once";
  constexpr size_t kShared = 4;
  std::atomic<uint64_t> shared[kShared] = {};
  std::atomic<bool> done{false};
  std::atomic<size_t> found{0}, missed{0};
  std::vector<std::thread> readers, writers;
  for (uint64_t i = 0; i < 3; i++) {
    readers.emplace_back([&, i] {
      Random random(seed + i);
      while (!done.load()) {
        const size_t at = random.below(kShared);
        const uint64_t handle = shared[at].load();
        if (!handle) continue;
        TableRow row;
        if (!row.open(handle, 0)) {
          missed++;
          continue;
        }
        const int32_t* const data = row.at(0)->as<int32_t>();
        // Twice, with time for a writer in between: memory that is open is not written.
        const int32_t first = data[0];
        std::this_thread::yield();
        if (data[0] != first || first < 0 || data[1] != 0 || data[2] != 0)
          fail("an array changes while it is read", at, 0, data[0], first, 0);
        found++;
      }
    });
  }
  for (uint64_t i = 0; i < 2; i++) {
    writers.emplace_back([&, i] {
      Random random(seed + 10 + i);
      for (int32_t number = 0; number < 3000; number++) {
        // Each writer has slots of its own.
        const size_t at = i + 2 * random.below(kShared / 2);
        Table table(random, number);
        if (!table.handle) fail("a table cannot be opened", at, 0, 0, 0, 0);
        shared[at].store(table.handle);
        if (random.below(2)) std::this_thread::yield();
        if (!close_table(table.handle)) fail("an open table cannot be closed", at, 0, 0, 0, 0);
        if (close_table(table.handle)) fail("a table is closed twice", at, 0, 0, 0, 0);
        table.spoil();
      }
    });
  }
  for (std::thread& each : writers) each.join();
  // One more that stays, so that there is always something to find.
  Random random(seed + 20);
  Table table(random, 7);
  for (std::atomic<uint64_t>& each : shared) each.store(table.handle);
  for (const size_t before = found.load(); found.load() < before + 100;) std::this_thread::yield();
  done.store(true);
  for (std::thread& each : readers) each.join();
  close_table(table.handle);
  if (!found.load() || !missed.load()) fail("readers and writers never met", found, missed, 0, 0, 0);
}

// Bytes that are zero, and those before and behind them, which stay.
void check_zero(Random& random) {
  const size_t bytes = random.below(3) ? random.below(9000) : random.below(100000),
               before = random.below(5000);
  shape = "zeros " + std::to_string(bytes) + " behind " + std::to_string(before);
  const Guarded memory(before + bytes + 100, 64);
  memset(memory.data(), 0x5a, memory.size());
  zero(memory.data() + before, bytes);
  for (size_t i = 0; i < memory.size(); i++) {
    const char expected = i >= before && i < before + bytes ? 0 : 0x5a;
    if (memory.data()[i] != expected) fail("a byte is wrong", i, bytes, memory.data()[i], expected, 0);
  }
}
