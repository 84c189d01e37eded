// SPDX-License-Identifier: Apache-2.0
//! The report of an exploration: counts and a verdict.
//!
//! Twin: kvcore/check/search/report.py.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::oracle::calls::Call;
use crate::types::violation::Violation;

/// The goals that a state reaches by itself.
pub const SHOWN: [&str; 3] = ["sharing", "duplicates", "stale"];
/// Which of them a state reaches.
pub type Shown = [bool; SHOWN.len()];

/// The names of the moves of a path.
pub type MoveNames = SmallVec<[&'static str; 3]>;

/// How often each thing happened: moves, calls with what they gave, commands and goals.
#[derive(Debug, Clone, Default)]
pub struct Notes {
    moves: Counts<MoveNames>,
    calls: Counts<(&'static str, &'static str)>,
    /// By kind ("command", "goal") and name.
    others: Counts<(&'static str, &'static str)>,
}

type Counts<K> = HashMap<K, u64, FxBuildHasher>;

impl Notes {
    /// Count an edge by the names of its moves.
    pub fn note_moves(&mut self, names: &[&'static str]) {
        match self.moves.get_mut(names) {
            Some(count) => *count += 1,
            None => _ = self.moves.insert(MoveNames::from_slice(names), 1),
        }
    }

    /// Count a call by what it gave: done, refused and why, or the error's name.
    pub fn note_call(&mut self, transition: &'static str, said: &'static str) {
        *self.calls.entry((transition, said)).or_insert(0) += 1;
    }

    /// Count a command by its name.
    pub fn note_command(&mut self, name: &'static str) {
        *self.others.entry(("command", name)).or_insert(0) += 1;
    }

    /// Count a goal that was reached, if it was.
    pub fn note_goal(&mut self, name: &'static str, reached: bool) {
        if reached {
            *self.others.entry(("goal", name)).or_insert(0) += 1;
        }
    }

    /// Count what a new state shows.
    pub fn note_shown(&mut self, shown: Shown) {
        SHOWN.iter().zip(shown).for_each(|(name, reached)| self.note_goal(name, reached));
    }

    /// Add the counts of another worker.
    pub fn add(&mut self, other: &Notes) {
        for (names, &count) in &other.moves {
            *self.moves.entry_ref(names).or_insert(0) += count;
        }
        for (&thing, &count) in &other.calls {
            *self.calls.entry(thing).or_insert(0) += count;
        }
        for (&thing, &count) in &other.others {
            *self.others.entry(thing).or_insert(0) += count;
        }
    }

    /// Return the counts by kind ("move", "call", "goal", "command") and name, sorted.
    #[must_use]
    pub fn sorted(&self) -> Vec<(&'static str, String, u64)> {
        let moves = self.moves.iter().map(|(names, &count)| ("move", names.join(", "), count));
        let call = |(&(name, said), &count): (&(&str, &str), &u64)| {
            ("call", format!("{name}: {said}"), count)
        };
        let others = self.others.iter().map(|(&(kind, name), &n)| (kind, name.to_owned(), n));
        let mut all: Vec<_> = moves.chain(self.calls.iter().map(call)).chain(others).collect();
        all.sort_unstable();
        all
    }
}

/// Why an exploration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum End {
    /// Every state was explored.
    #[default]
    Complete,
    /// At the greatest depth.
    Depth,
    /// At the greatest number of states.
    States,
    /// At the end of its time.
    Seconds,
    /// By the caller.
    Interrupted,
    /// At a violation.
    Violation,
}

impl End {
    /// Return the word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            End::Complete => "complete",
            End::Depth => "bounded by depth",
            End::States => "bounded by states",
            End::Seconds => "bounded by time",
            End::Interrupted => "interrupted",
            End::Violation => "violation",
        }
    }
}

/// A violation with the shortest calls that lead to it, from the start; a batch is taken after each
/// edge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Story {
    /// The property that fails.
    pub violation: Violation,
    /// One list an edge.
    pub edges: Vec<Vec<Call>>,
}

/// The report of an exploration.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Why it ended.
    pub end: End,
    /// States that are known.
    pub num_states: u64,
    /// Edges that were followed.
    pub num_edges: u64,
    /// States whose edges were not tried.
    pub num_waiting: u64,
    /// States by their distance from the start.
    pub depths: Vec<u64>,
    /// How often each thing happened.
    pub notes: Notes,
    /// Where it ended at one.
    pub story: Option<Story>,
    /// Wall time.
    pub seconds: f64,
    /// Most bytes that states took at once: names, parents and those that wait.
    pub num_bytes: u64,
}
