// SPDX-License-Identifier: Apache-2.0
//! Room that is there before it is needed, and is used again.
//!
//! Why: a search copies a state for each of its edges, and allocating took a quarter of its time.
//! `clone_from` of a state copies field by field and allocates nothing.

/// `Clone` for a struct, whose `clone_from` keeps the room of each field. Takes the struct's
/// definition, or its name and fields.
macro_rules! clone_in_place {
    ($(#[$meta:meta])* $pub:vis struct $name:ident {
        $($(#[$note:meta])* $visible:vis $field:ident: $kind:ty,)*
    }) => {
        $(#[$meta])*
        $pub struct $name {
            $($(#[$note])* $visible $field: $kind,)*
        }

        $crate::types::clone_in_place::clone_in_place!($name { $($field),* });
    };
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

/// A column of zeros in memory that is already mapped: lazily allocated zeros cost a page fault
/// when a step first writes them.
#[expect(clippy::slow_vector_initialization)] // the writes are what it is for
pub(crate) fn touched_zeros(length: usize) -> Vec<u32> {
    let mut column = Vec::with_capacity(length);
    column.resize(length, 0);
    column
}
