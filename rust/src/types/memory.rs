// SPDX-License-Identifier: Apache-2.0
//! Whether pools fit in memory, asked before they are made.
//!
//! Why: a system that lends more memory than it has ends the process when the pages are written,
//! and a failed allocation ends it at once. What a pool needs is the language's own figure.
//! Twin: kvcore/types/memory.py.

use std::fs::read_to_string;
use std::hint::black_box;

use crate::types::errors::Error;

/// Of the columns of a pool: owners, links of the queue, keys, chain, rings.
const BLOCK_BYTES: u64 = 60;
/// Needs up to this size are not compared with the memory of the machine.
const SMALL_BYTES: u64 = 1 << 26;
const MEMINFO: &str = "/proc/meminfo";
const CGROUP: &str = "/sys/fs/cgroup/memory.max";

/// Fails with PoolTooLarge unless pools of this many blocks fit.
pub fn check_memory(num_blocks: u64) -> Result<(), Error> {
    let buckets = 4 * (2 * num_blocks).next_power_of_two();
    let needed = BLOCK_BYTES * num_blocks + buckets;
    let available = room_for(needed);
    if available >= needed {
        return Ok(());
    }
    let (needed_bytes, available_bytes) = (needed as i64, available as i64);
    Err(Error::PoolTooLarge { num_blocks: num_blocks as i64, needed_bytes, available_bytes })
}

/// Return how many of these bytes are available; if not all, the result may be too low.
pub fn room_for(needed: u64) -> u64 {
    let reported = if needed > SMALL_BYTES { num_available() } else { Vec::new() };
    num_reservable(reported.into_iter().fold(needed, u64::min))
}

/// Return `size`, or its largest half, quarter and so on that can be allocated.
fn num_reservable(mut size: u64) -> u64 {
    let fits = |size: u64| {
        let mut room: Vec<u8> = Vec::new();
        let reserved = usize::try_from(size).is_ok_and(|size| room.try_reserve_exact(size).is_ok());
        black_box(&room);
        reserved
    };
    while size > 0 && !fits(size) {
        size /= 2;
    }
    size
}

/// Return the bytes available to this process, as far as the system reports them.
fn num_available() -> Vec<u64> {
    let mut found = Vec::new();
    let sizes = read_to_string(MEMINFO).unwrap_or_default();
    let size = |name: &str| {
        let rest = sizes.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    found.extend(size("MemAvailable:").map(|free| 1024 * (free + size("SwapFree:").unwrap_or(0))));
    found.extend(read_to_string(CGROUP).ok().and_then(|text| text.trim().parse::<u64>().ok()));
    found
}
