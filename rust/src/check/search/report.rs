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
    moves: HashMap<MoveNames, u64, FxBuildHasher>,
    calls: Counts,
    /// By kind ("command", "goal") and name.
    others: Counts,
}

/// Counts by two names, found by where the names lie: a few, and each edge adds to some. The same
/// names may lie in several places, and are counted apart until the counts are sorted.
#[derive(Debug, Clone, Default)]
struct Counts(Vec<([&'static str; 2], u64)>);

impl Counts {
    fn add(&mut self, names: [&'static str; 2], count: u64) {
        let same = |each: &[&str; 2]| (0..2).all(|at| std::ptr::eq(each[at], names[at]));
        match self.0.iter_mut().find(|(each, _)| same(each)) {
            Some((_, counted)) => *counted += count,
            None => self.0.push((names, count)),
        }
    }
}

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
        self.calls.add([transition, said], 1);
    }

    /// Count a command by its name.
    pub fn note_command(&mut self, name: &'static str) {
        self.others.add(["command", name], 1);
    }

    /// Count a goal that was reached, if it was.
    pub fn note_goal(&mut self, name: &'static str, reached: bool) {
        if reached {
            self.others.add(["goal", name], 1);
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
        other.calls.0.iter().for_each(|&(names, count)| self.calls.add(names, count));
        other.others.0.iter().for_each(|&(names, count)| self.others.add(names, count));
    }

    /// Return the counts by kind ("move", "call", "goal", "command") and name, sorted.
    #[must_use]
    pub fn sorted(&self) -> Vec<(&'static str, String, u64)> {
        let moves = self.moves.iter().map(|(names, &count)| ("move", names.join(", "), count));
        let calls = self.calls.0.iter();
        let calls = calls.map(|&([name, said], n)| ("call", format!("{name}: {said}"), n));
        let others = self.others.0.iter().map(|&([kind, name], n)| (kind, name.to_owned(), n));
        let mut all: Vec<_> = moves.chain(calls).chain(others).collect();
        all.sort_unstable();
        all.dedup_by(|more, kept| {
            let same = (more.0, &more.1) == (kept.0, &kept.1);
            kept.2 += if same { more.2 } else { 0 };
            same
        });
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
