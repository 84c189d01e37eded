// SPDX-License-Identifier: Apache-2.0
//! Room that is there before it is needed, and is used again.
//!
//! Why: a search copies a state for each of its edges, and allocating took a quarter of its time.
//! `clone_from` of a state copies field by field and allocates nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::{Array, SmallVec};

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
                #[allow(unused_imports)] // some structs have fields of one sort alone
                use $crate::types::clone_in_place::{AnyRoom as _, KnownRoom as _, Room};
                $((&mut Room(&mut self.$field)).fill(&source.$field);)*
            }
        }
    };
}

pub(crate) use clone_in_place;

/// The room of one field. Of the two methods `fill`, the compiler takes that of `KnownRoom` for the
/// types that it is made for, since it needs one reference less.
pub(crate) struct Room<'a, T>(pub(crate) &'a mut T);

/// Types whose own `clone_from` does more than needed.
pub(crate) trait KnownRoom {
    type Value;

    fn fill(&mut self, source: &Self::Value);
}

/// All others.
pub(crate) trait AnyRoom<T> {
    fn fill(&mut self, source: &T);
}

impl<K: Clone + Ord, V: Clone> KnownRoom for Room<'_, BTreeMap<K, V>> {
    type Value = BTreeMap<K, V>;

    fn fill(&mut self, source: &BTreeMap<K, V>) {
        if !(self.0.is_empty() && source.is_empty()) {
            self.0.clone_from(source);
        }
    }
}

impl<T: Clone + Ord> KnownRoom for Room<'_, BTreeSet<T>> {
    type Value = BTreeSet<T>;

    fn fill(&mut self, source: &BTreeSet<T>) {
        if !(self.0.is_empty() && source.is_empty()) {
            self.0.clone_from(source);
        }
    }
}

impl<A: Array<Item: Copy>> KnownRoom for Room<'_, SmallVec<A>> {
    type Value = SmallVec<A>;

    fn fill(&mut self, source: &SmallVec<A>) {
        self.0.clear();
        if !source.is_empty() {
            self.0.extend_from_slice(source);
        }
    }
}

impl<T: Copy> KnownRoom for Room<'_, Vec<T>> {
    type Value = Vec<T>;

    fn fill(&mut self, source: &Vec<T>) {
        self.0.clear();
        if !source.is_empty() {
            self.0.extend_from_slice(source);
        }
    }
}

impl<T: ?Sized> KnownRoom for Room<'_, Arc<T>> {
    type Value = Arc<T>;

    fn fill(&mut self, source: &Arc<T>) {
        if !Arc::ptr_eq(self.0, source) {
            self.0.clone_from(source);
        }
    }
}

impl<T: Copy + Eq, S: Clone> KnownRoom for Room<'_, HashMap<Arc<str>, T, S>> {
    type Value = HashMap<Arc<str>, T, S>;

    fn fill(&mut self, source: &HashMap<Arc<str>, T, S>) {
        let mut pairs = self.0.iter().zip(source);
        let same = pairs.all(|(one, other)| Arc::ptr_eq(one.0, other.0) && one.1 == other.1);
        if self.0.len() != source.len() || !same {
            self.0.clone_from(source);
        }
    }
}

impl<T: Clone> AnyRoom<T> for &mut Room<'_, T> {
    fn fill(&mut self, source: &T) {
        self.0.clone_from(source);
    }
}

/// A column of zeros in memory that is already mapped: lazily allocated zeros cost a page fault
/// when a step first writes them.
#[expect(clippy::slow_vector_initialization)] // the writes are what it is for
pub(crate) fn touched_zeros(length: usize) -> Vec<u32> {
    let mut column = Vec::with_capacity(length);
    column.resize(length, 0);
    column
}
