// SPDX-License-Identifier: Apache-2.0
//! A map from rows, for data that every step looks up for every request.
//!
//! Invariants: rows are dense, so a column gives the position of each row's entry. The entries lie
//! together in insertion order; when one leaves, the last takes its place.

use crate::mutants::{Mutant, seeded};
use crate::types::ids::Row;

/// Entries by row.
#[derive(Debug)]
pub struct RowMap<T> {
    entries: Vec<(Row, T)>,
    /// For each row the place of its entry plus one, or 0.
    places: Vec<u32>,
}

impl<T: Clone> Clone for RowMap<T> {
    fn clone(&self) -> Self {
        RowMap { entries: self.entries.clone(), places: self.places.clone() }
    }

    fn clone_from(&mut self, source: &Self) {
        self.entries.clone_from(&source.entries);
        self.places.clone_from(&source.places);
    }
}

impl<T> Default for RowMap<T> {
    fn default() -> Self {
        RowMap { entries: Vec::new(), places: Vec::new() }
    }
}

impl<T> RowMap<T> {
    /// The place of a row's entry.
    fn place(&self, row: Row) -> Option<usize> {
        (self.places.get(row.index()).copied().unwrap_or(0) as usize).checked_sub(1)
    }

    /// The entry of a row.
    #[must_use]
    pub fn get(&self, row: Row) -> Option<&T> {
        self.place(row).map(|place| &self.entries[place].1)
    }

    /// The entry of a row, to be changed.
    #[must_use]
    pub fn get_mut(&mut self, row: Row) -> Option<&mut T> {
        self.place(row).map(|place| &mut self.entries[place].1)
    }

    /// Add an entry for a row that has none.
    pub fn insert_new(&mut self, row: Row, entry: T) {
        debug_assert!(self.place(row).is_none(), "{row:?} has an entry already");
        if self.places.len() <= row.index() {
            self.places.resize(row.index() + 1, 0);
        }
        self.entries.push((row, entry));
        self.places[row.index()] = self.entries.len() as u32;
    }

    /// Add an entry for a row, unless it has one.
    #[inline]
    pub fn insert_missing(&mut self, row: Row, entry: T) {
        match self.places.get_mut(row.index()) {
            Some(0) => {
                self.entries.push((row, entry));
                self.places[row.index()] = self.entries.len() as u32;
            }
            Some(_) => {}
            None => self.insert_new(row, entry),
        }
    }

    /// Add an entry for a row; false, with no change, if it has one.
    #[inline(always)] // of each request in each step
    pub fn insert_once(&mut self, row: Row, entry: T) -> bool {
        match self.places.get_mut(row.index()) {
            Some(place @ 0) => {
                self.entries.push((row, entry));
                *place = self.entries.len() as u32;
            }
            Some(_) => return false,
            None => self.insert_new(row, entry),
        }
        true
    }

    /// The number of entries.
    #[must_use]
    pub fn num_entries(&self) -> usize {
        self.entries.len()
    }

    /// Forget the entries that were added after the first `len`; none was removed since.
    pub fn truncate(&mut self, len: usize) {
        for (row, _) in self.entries.drain(len..) {
            self.places[row.index()] = 0;
        }
    }

    /// Take the entry of a row.
    pub fn remove(&mut self, row: Row) -> Option<T> {
        let place = self.place(row)?;
        self.places[row.index()] = 0;
        let (_, entry) = self.entries.swap_remove(place);
        if let Some((moved, _)) = self.entries.get(place)
            && !seeded(Mutant::RowMapKeepsPlace)
        {
            self.places[moved.index()] = place as u32 + 1;
        }
        Some(entry)
    }

    /// Forget every entry, but keep the memory.
    pub fn clear(&mut self) {
        let places = &mut self.places[..];
        self.entries.iter().for_each(|(row, _)| places[row.index()] = 0);
        self.entries.clear();
    }

    /// The rows that have an entry, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = Row> + '_ {
        self.entries.iter().map(|(row, _)| *row)
    }

    /// The rows and their entries, in insertion order unless one was removed.
    pub fn iter(&self) -> impl Iterator<Item = (Row, &T)> {
        self.entries.iter().map(|(row, entry)| (*row, entry))
    }

    /// The entries, in no particular order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|(_, entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_until_it_leaves() {
        let mut map = RowMap::default();
        for row in [3, 0, 7] {
            map.insert_new(Row(row), 10 * row);
        }
        assert_eq!(map.remove(Row(3)), Some(30));
        assert_eq!((map.remove(Row(3)), map.get(Row(3)), map.get(Row(9))), (None, None, None));
        assert_eq!(map.get(Row(0)), Some(&0));
        assert_eq!(map.get_mut(Row(7)), Some(&mut 70));
        map.insert_missing(Row(7), 8);
        map.insert_missing(Row(5), 50);
        assert_eq!((map.get(Row(7)).copied(), map.remove(Row(5))), (Some(70), Some(50)));
        assert_eq!(map.keys().map(|row| row.0).sum::<u32>(), 7);
        map.clear();
        assert_eq!((map.get(Row(7)), map.values().count()), (None, 0));
        map.insert_new(Row(7), 1);
        assert_eq!(map.remove(Row(7)), Some(1));
    }
}
