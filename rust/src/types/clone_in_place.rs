// SPDX-License-Identifier: Apache-2.0
//! Room that is there before it is needed, and is used again.
//!
//! Rules: `clone_from` of a state copies field by field, so that a search that copies a state for
//! each of its edges makes no room anew; a quarter of its time went there.

use crate::state::state::{OpenBatch, RequestState, State};

/// `Clone` for a struct of these fields, whose `clone_from` keeps the room of each.
macro_rules! clone_in_place {
    ($name:ident { $($field:ident),* $(,)? }) => {
        impl Clone for $name {
            fn clone(&self) -> Self {
                $name { $($field: self.$field.clone()),* }
            }

            fn clone_from(&mut self, source: &Self) {
                $(self.$field.clone_from(&source.$field);)*
            }
        }
    };
}

pub(crate) use clone_in_place;

/// A column of zeros whose memory is there: zeros that an allocator promises cost a page fault
/// where a step first writes them.
#[expect(clippy::slow_vector_initialization)] // the writes are what it is for
pub(crate) fn touched_zeros(length: usize) -> Vec<u32> {
    let mut column = Vec::with_capacity(length);
    column.resize(length, 0);
    column
}

clone_in_place!(RequestState {
    request_id,
    tokens,
    drafts,
    block_hashes,
    own_hashes,
    skip_reading,
    extra_keys,
    num_computed,
    tables,
    num_cached,
    host_tables,
    preempted,
    num_loading,
    load_end,
    quiet_until,
    quiet_since,
    apart
});

clone_in_place!(OpenBatch { number, records, published, merges, marks, given });

clone_in_place!(State {
    config,
    root,
    hash_block_size,
    hit_alignment,
    has_windows,
    scales,
    device,
    host,
    requests,
    rows,
    free_rows,
    batch,
    effects,
    host_effects,
    stats,
    new_blocks,
    operations,
    next_operation,
    unfinished,
    loads,
    num_pins
});
