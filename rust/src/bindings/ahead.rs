// SPDX-License-Identifier: Apache-2.0
//! A thread that prepares the pages of a record's file before they are written.
//!
//! Invariants: it changes no byte, and takes no lock of Python's. Its advice names pages of the
//! mapping only while `pages` says so, and it ends before its recorder. In a process that was
//! forked it does not exist, and nothing waits for it. Gain: a new page costs the thread that first
//! writes it 1 to 2 us in the kernel, which is not the manager's thread any more.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle, park};

/// How much is prepared at once; a thread that maps memory meanwhile waits for it.
const PART: usize = 1 << 16;
/// How far the pages are prepared, and after how many bytes the thread continues: to wake it costs
/// the manager's thread about 10 us.
const FAR: usize = 1 << 23;
const STEP: usize = 1 << 22;

/// The pages of the mapping: its address, its size, and up to where they are prepared.
#[derive(Default)]
struct Pages {
    address: usize,
    size: usize,
    ready: usize,
}

#[derive(Default)]
struct Shared {
    pages: Mutex<Pages>,
    /// Up to where the pages are written.
    at: AtomicUsize,
    is_over: AtomicBool,
}

/// The thread of a recorder, if the system has this advice.
pub(crate) struct Ahead {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    process: u32,
    /// The place at which the thread continues.
    next: usize,
}

impl Ahead {
    /// Start the thread, which has nothing to do yet.
    pub(crate) fn start() -> Self {
        let shared = Arc::<Shared>::default();
        let its = Arc::clone(&shared);
        let builder = Builder::new().name("kvcore-record".into()).stack_size(1 << 17);
        let spawned = cfg!(target_os = "linux").then(|| builder.spawn(move || its.run()).ok());
        let process = std::process::id();
        Ahead { shared, thread: spawned.flatten(), process, next: usize::MAX }
    }

    /// Prepare the pages of this mapping from a place on.
    pub(crate) fn enter(&mut self, mapping: &mut [u8], at: usize) {
        let address = mapping.as_mut_ptr().expose_provenance();
        let mut pages = self.shared.lock();
        *pages = Pages { address, size: mapping.len(), ready: at };
        self.shared.at.store(at, Ordering::Relaxed); // not a place in the mapping before
        drop(pages);
        self.wake(at);
    }

    /// Leave the mapping, before it goes.
    pub(crate) fn leave(&mut self) {
        self.next = usize::MAX;
        *self.shared.lock() = Pages::default();
    }

    /// Note up to where the mapping is written.
    #[inline]
    pub(crate) fn reach(&mut self, at: usize) {
        if at >= self.next {
            self.wake(at);
        }
    }

    #[cold]
    fn wake(&mut self, at: usize) {
        if let Some(thread) = &self.thread {
            self.next = at + STEP;
            self.shared.at.store(at, Ordering::Relaxed);
            thread.thread().unpark();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.process != std::process::id() {
            return std::mem::forget(thread); // a fork has no other thread, nor its stack
        }
        self.shared.is_over.store(true, Ordering::Relaxed);
        thread.thread().unpark();
        drop(thread.join());
    }
}

impl Shared {
    /// The pages; a thread that panicked has left them as they were.
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepare pages until it is over.
    fn run(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            let is_far = self.lock().prepare(self.at.load(Ordering::Relaxed));
            match is_far {
                Some(false) => {}
                Some(true) => park(),
                None => return,
            }
        }
    }
}

impl Pages {
    /// Prepare a part; returns whether they are prepared far enough, None if the system cannot.
    fn prepare(&mut self, at: usize) -> Option<bool> {
        let from = self.ready.max(at) / PART * PART;
        if self.ready >= self.size || from >= self.size || from > at + FAR {
            return Some(true);
        }
        let end = (from + PART).min(self.size);
        populate(self.address + from, end - from)?;
        self.ready = end;
        Some(false)
    }
}

/// Map pages to be written, without a change; returns None if the system cannot.
#[cfg(target_os = "linux")]
fn populate(address: usize, size: usize) -> Option<()> {
    use std::ffi::{c_int, c_void};
    use std::io::{Error, ErrorKind};

    const MADV_POPULATE_WRITE: c_int = 23;
    unsafe extern "C" {
        fn madvise(address: *mut c_void, size: usize, advice: c_int) -> c_int;
    }
    let place = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: this advice changes no byte, whatever is mapped there.
    if unsafe { madvise(place, size, MADV_POPULATE_WRITE) } == 0 {
        return Some(());
    }
    (Error::last_os_error().kind() == ErrorKind::Interrupted).then_some(())
}

/// Map pages to be written, without a change; returns None if the system cannot.
#[cfg(not(target_os = "linux"))]
fn populate(_address: usize, _size: usize) -> Option<()> {
    None
}
