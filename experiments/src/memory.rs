//! How much memory a thread asks for while it is watched.
//!
//! The program's allocator is the system's. Only while `fuzz` runs, and only for the thread that runs a
//! reader, it keeps two numbers: what is held, and the most that was.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

static WATCHING: AtomicBool = AtomicBool::new(false);

thread_local! {
    // Both start without an allocation and need no destructor, so that an allocator may use them.
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, which counts for a thread that is watched.
#[derive(Debug, Default)]
pub struct CountingAllocator;

fn count(change: i64) {
    // A thread that is ending has no counters any more; nothing watches it either.
    let _ = HELD.try_with(|held| {
        let now = held.get().saturating_add(change);
        held.set(now);
        let _ = MOST.try_with(|most| most.set(most.get().max(now)));
    });
}

fn is_watching() -> bool {
    WATCHING.load(Ordering::Relaxed)
}

// SAFETY: every call goes to the system's allocator with the arguments as they came; the counters beside it
// neither allocate nor unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_watching() {
            count(layout.size() as i64);
        }
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_watching() {
            count(-(layout.size() as i64));
        }
        // SAFETY: the pointer came from the system's allocator, by `alloc` or `realloc` here.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_watching() {
            count(layout.size() as i64);
        }
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_watching() {
            count(size as i64 - layout.size() as i64);
        }
        // SAFETY: the pointer came from the system's allocator with this layout.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Switches counting on until it is dropped.
pub(crate) struct Watch;

impl Watch {
    pub(crate) fn start() -> Self {
        WATCHING.store(true, Ordering::Relaxed);
        Self
    }

    /// Runs `work` and gives the most bytes that this thread held meanwhile beyond what it held before.
    pub(crate) fn most_held<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        HELD.set(0);
        MOST.set(0);
        let result = work();
        (result, u64::try_from(MOST.get()).unwrap_or(0))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHING.store(false, Ordering::Relaxed);
    }
}
