// SPDX-License-Identifier: Apache-2.0
//! Every reachable node of a model, breadth first, by one worker or several.
//!
//! A level is explored in rounds of a fixed size, whose pieces the workers take one after the
//! other; what they found is added in the order of the pieces, so that counts, stories and verdicts
//! do not depend on the number of workers. A node is known by 128 bits of its name, or by the
//! number of its whole name (`names/fingerprints.rs`); those of the level that is explored, and of
//! the next one, wait packed. Twin: kvcore/check/search/search.py.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use hashbrown::HashSet;
use rustc_hash::FxBuildHasher;

use crate::check::names::fingerprints::Visited;
use crate::check::search::core_model::CoreModel;
use crate::check::search::frontier::{Level, Nodes, PIECE};
use crate::check::search::report::{End, Notes, Report, Shown, Story};
use crate::check::world::model::{Broken, Edge, Findings, Fingerprint, Model, Sink};

/// Nodes that are explored before what they lead to is added.
const ROUND: usize = 32 * PIECE;

/// How far a search goes; None: as far as there is something.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)] // the fields are the limits that each names
pub struct Limits {
    pub max_depth: Option<u32>,
    pub max_states: Option<u64>,
    pub max_seconds: Option<f64>,
}

/// How far a search has come.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // the fields are the counts that each names
pub struct Progress {
    pub num_states: u64,
    pub num_edges: u64,
    pub depth: u32,
    pub num_waiting: u64,
    pub seconds: f64,
    pub num_bytes: u64,
}

/// Explore a model. models: one for each worker. watch: is told now and then how far the search has
/// come, and says whether it goes on.
pub fn explore<M: Model>(
    models: &mut [M],
    limits: &Limits,
    watch: &mut dyn FnMut(&Progress) -> bool,
) -> Report {
    let (first, visited, report) = (Vec::new(), Visited::default(), Report::default());
    let mut search = Search { start: Instant::now(), first, visited, report };
    let end = match search.run(models, limits, watch) {
        Ok(end) => end,
        Err((parent, broken)) => {
            search.explain(&mut models[0], parent, broken);
            End::Violation
        }
    };
    search.report(end)
}

/// Return the states of a model up to this many, each with what does not hold there.
pub fn checker(model: &mut CoreModel, max_states: Option<u64>) -> Vec<Findings> {
    let (visited, mut found) = (Visited::default(), Vec::new());
    let Ok((name, first)) = model.start() else { return found };
    let mut met = HashSet::default();
    met.insert(name);
    let mut waiting = VecDeque::from([first]);
    while let Some(node) = waiting.pop_front() {
        let (mut piece, mut notes) = (Piece::default(), Notes::default());
        let mut sink = Collector { visited: &visited, piece: &mut piece, met: &mut met, parent: 0 };
        if model.edges(&node, &mut notes, &mut sink).is_err() {
            break;
        }
        found.push(model.findings(&node));
        let room = max_states.is_none_or(|most| (found.len() + waiting.len()) as u64 <= most);
        if room {
            waiting.extend((0..piece.nodes.len()).map(|at| piece.nodes.node(at).to_vec()));
        }
    }
    found
}

/// What one piece of a level leads to.
#[derive(Default)]
struct Piece {
    /// The place of the parent in the level, the edge, and what the node shows.
    found: Vec<(usize, Edge, Shown)>,
    nodes: Nodes,
    num_edges: u64,
    /// The place of the parent, and what broke there.
    broken: Option<(usize, Broken)>,
}

/// A piece that is being explored.
struct Collector<'a> {
    visited: &'a Visited,
    piece: &'a mut Piece,
    met: &'a mut HashSet<Fingerprint, FxBuildHasher>,
    parent: usize,
}

impl Sink for Collector<'_> {
    fn is_new(&mut self, name: Fingerprint) -> bool {
        self.piece.num_edges += 1;
        !self.visited.contains(name) && self.met.insert(name)
    }

    fn keep(&mut self, edge: Edge, shown: Shown, packed: &[u8]) {
        self.piece.found.push((self.parent, edge, shown));
        self.piece.nodes.push(packed);
    }
}

struct Search {
    start: Instant,
    first: Vec<u8>,
    visited: Visited,
    /// What was found so far.
    report: Report,
}

impl Search {
    /// Explore to the end; fails with the number of a state and what broke behind it.
    fn run<M: Model>(
        &mut self,
        models: &mut [M],
        limits: &Limits,
        watch: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<End, (u32, Broken)> {
        let (name, node) = models[0].start().map_err(|broken| (0, broken))?;
        self.visited.insert(name, 0, 0);
        self.first.clone_from(&node);
        let mut level = Level::default();
        level.push(&node);
        self.report.depths.push(1);
        let mut first_state = 0;
        while level.len() > 0 {
            if limits.max_depth.is_some_and(|most| self.report.depths.len() as u32 > most) {
                self.report.num_waiting = level.len() as u64;
                return Ok(End::Depth);
            }
            let mut next = Level::default();
            self.report.depths.push(0);
            let mut done = 0;
            while done < level.len() {
                let end = level.len().min(done + ROUND);
                let pieces = explore_round(models, &self.visited, &level, (done, end));
                done = end;
                let mut cut = false;
                for piece in pieces {
                    if let Some(parent) = self.add(&mut next, piece, first_state, limits)? {
                        (done, cut) = (parent + 1, true);
                        break;
                    }
                }
                let bytes = level.num_bytes() + next.num_bytes() + self.visited.num_bytes();
                self.report.num_bytes = self.report.num_bytes.max(bytes as u64);
                self.report.num_waiting = (level.len() - done + next.len()) as u64 + u64::from(cut);
                if let Some(end) = self.stop(limits, watch) {
                    return Ok(end);
                }
            }
            first_state += level.len() as u32;
            level = next;
        }
        self.report.depths.pop();
        Ok(End::Complete)
    }

    /// Add what a piece leads to; return the parent of the first state for which there is no room.
    fn add(
        &mut self,
        next: &mut Level,
        piece: (Piece, Notes),
        first_state: u32,
        limits: &Limits,
    ) -> Result<Option<usize>, (u32, Broken)> {
        let (piece, notes) = piece;
        self.report.num_edges += piece.num_edges;
        self.report.notes.add(&notes);
        let mut cut = None;
        for (place, &(parent, edge, shown)) in piece.found.iter().enumerate() {
            if self.visited.contains(edge.name) {
                continue;
            }
            if limits.max_states.is_some_and(|most| self.visited.len() as u64 >= most) {
                cut = Some(parent);
                break;
            }
            self.visited.insert(edge.name, first_state + parent as u32, edge.number);
            self.report.notes.note_shown(shown);
            next.push(piece.nodes.node(place));
            let last = self.report.depths.len() - 1;
            self.report.depths[last] += 1;
        }
        match piece.broken {
            Some((parent, broken)) if cut.is_none_or(|at| at == parent) => {
                Err((first_state + parent as u32, broken))
            }
            _ => Ok(cut),
        }
    }

    /// Return why the search ends here, if it does.
    fn stop(&self, limits: &Limits, watch: &mut dyn FnMut(&Progress) -> bool) -> Option<End> {
        let seconds = self.start.elapsed().as_secs_f64();
        let progress = Progress {
            num_states: self.visited.len() as u64,
            num_edges: self.report.num_edges,
            depth: self.report.depths.len() as u32 - 1,
            num_waiting: self.report.num_waiting,
            seconds,
            num_bytes: self.report.num_bytes,
        };
        if !watch(&progress) {
            Some(End::Interrupted)
        } else if self.report.num_waiting == 0 {
            None
        } else if limits.max_states.is_some_and(|most| progress.num_states >= most) {
            Some(End::States)
        } else {
            limits.max_seconds.is_some_and(|most| seconds >= most).then_some(End::Seconds)
        }
    }

    /// Find the calls that lead to what broke behind a state.
    fn explain<M: Model>(&mut self, model: &mut M, state: u32, broken: Broken) {
        let mut edges = Vec::new();
        let mut node = self.first.clone();
        for edge in self.visited.edges_to(state) {
            let Some((calls, reached)) = model.follow(&node, edge) else { break };
            edges.push(calls);
            node = reached;
        }
        edges.push(broken.calls);
        self.report.story = Some(Story { violation: broken.violation, edges });
    }

    fn report(mut self, end: End) -> Report {
        while self.report.depths.last() == Some(&0) {
            self.report.depths.pop();
        }
        self.report.num_states = self.visited.len() as u64;
        self.report.seconds = self.start.elapsed().as_secs_f64();
        Report { end, ..self.report }
    }
}

/// Explore some nodes of a level by all workers; return what the pieces lead to, in their order.
fn explore_round<M: Model>(
    models: &mut [M],
    visited: &Visited,
    level: &Level,
    (first, end): (usize, usize),
) -> Vec<(Piece, Notes)> {
    let num_pieces = (end - first).div_ceil(PIECE);
    let next = AtomicUsize::new(0);
    let work = |model: &mut M| {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= num_pieces {
                return done;
            }
            let start = first + number * PIECE;
            let nodes = level.piece(start / PIECE);
            done.push((number, explore_piece(model, visited, &nodes, start)));
        }
    };
    let mut pieces: Vec<(usize, (Piece, Notes))> = match models {
        [model] => work(model),
        _ => std::thread::scope(|scope| {
            let work = &work;
            let workers: Vec<_> =
                models.iter_mut().map(|model| scope.spawn(move || work(model))).collect();
            let joined = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
            joined.flat_map(|done| done.expect("a worker catches what panics")).collect()
        }),
    };
    pieces.sort_unstable_by_key(|(number, _)| *number);
    pieces.into_iter().map(|(_, piece)| piece).collect()
}

fn explore_piece<M: Model>(
    model: &mut M,
    visited: &Visited,
    nodes: &Nodes,
    first: usize,
) -> (Piece, Notes) {
    let (mut piece, mut notes) = (Piece::default(), Notes::default());
    let mut met = HashSet::default();
    for place in 0..nodes.len() {
        let parent = first + place;
        let mut sink = Collector { visited, piece: &mut piece, met: &mut met, parent };
        if let Err(broken) = model.edges(nodes.node(place), &mut notes, &mut sink) {
            piece.broken = Some((parent, broken));
            break;
        }
    }
    (piece, notes)
}
