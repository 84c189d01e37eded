// SPDX-License-Identifier: Apache-2.0
//! A model to explore: a start, the edges of a node, a name for each class of nodes, a check.
//!
//! A search (`search.rs`) knows nothing else of what it explores. Edges come in a fixed order that
//! depends on the node alone, so that a run can be found again by the numbers of its edges. Each
//! worker has a model of its own. Twin: kvcore/check/world/model.py.

use crate::check::search::report::{Notes, Shown};
use crate::oracle::calls::Call;
use crate::types::violation::Violation;

/// 128 bits for the name of a class of nodes.
pub type Fingerprint = u128;

/// An edge: its number among those of its node, and the name of the node that it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// From 0 on, in the fixed order.
    pub number: u32,
    /// Of the class of nodes.
    pub name: Fingerprint,
}

/// A violation, where it is found; its calls begin at the node that was explored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The property that fails.
    pub violation: Violation,
    /// The calls up to the one that shows it.
    pub calls: Vec<Call>,
}

/// A node as bytes that other programs read, with the names of what does not hold there.
pub type Findings = (Vec<u8>, Vec<&'static str>);

/// A collector of a model's edges.
pub trait Sink {
    /// Tell whether no node of this name is known yet; the edge is counted.
    fn is_new(&mut self, name: Fingerprint) -> bool;

    /// Keep the packed node of an edge that was new, and what it shows.
    fn keep(&mut self, edge: Edge, shown: Shown, packed: &[u8]);
}

/// The interface of what a search explores, for one worker.
pub trait Model: Send {
    /// Return the name of the first node, and the node packed.
    fn start(&mut self) -> Result<(Fingerprint, Vec<u8>), Broken>;

    /// Follow every edge of a packed node, in order, and note what happens. Fails if one is wrong.
    fn edges(&mut self, node: &[u8], notes: &mut Notes, sink: &mut dyn Sink) -> Result<(), Broken>;

    /// Return the calls of one edge of a packed node, and the node that it leads to, packed.
    fn follow(&mut self, node: &[u8], edge: u32) -> Option<(Vec<Call>, Vec<u8>)>;
}
