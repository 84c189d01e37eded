// SPDX-License-Identifier: Apache-2.0
//! Watches what a thread allocates: the largest piece of memory, and how many.
//!
//! A decoder that believes a number in the bytes shows here before it fails anywhere.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The largest piece since the last call.
pub(super) fn take_largest() -> usize {
    LARGEST.replace(0)
}

/// Count the allocations and reallocations of this thread so far.
pub(super) fn count() -> u64 {
    COUNT.get()
}

fn note(size: usize) {
    // A thread that ends has no figures any more.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;
