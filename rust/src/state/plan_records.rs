// SPDX-License-Identifier: Apache-2.0
//! The records of a planned allocation, which `transitions/plan.rs` and its parts make.
//!
//! Twin: kvcore/state/plan_records.py.

use smallvec::SmallVec;

use crate::types::ids::{BlockId, Row};
use crate::types::values::Refused;

/// At most one per group: few groups have a window, so they need no heap memory.
pub type Trims = SmallVec<[Trim; 4]>;

/// Positions [first, end) of a group's table that become the null block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trim {
    /// The group of the table.
    pub group_id: u32,
    /// The first position.
    pub first: u32,
    /// The one behind the last.
    pub end: u32,
}

/// Tokens of an allocation, counted from the request's first one (drawn in the Python twin).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Computed and hit.
    pub local: u32,
    /// With the external ones.
    pub total: u32,
    /// With the new ones.
    pub scheduled: u32,
    /// With lookahead.
    pub slots: u32,
    /// The first query whose window the trim must keep; meaningless without windows.
    pub seen_from: u32,
}

/// A block of the request that is about to be written although it is shared or keyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewrite {
    /// The group of the table.
    pub group_id: u32,
    /// The place in the table.
    pub position: u32,
    /// Whether a fresh block takes its place.
    pub shared: bool,
    /// Whether it holds earlier positions, so that the fresh one is a copy.
    pub copied: bool,
    /// Whether its key names what is written, and stays.
    pub same: bool,
    /// Whether it is replaced for its keys alone.
    pub for_key: bool,
}

impl Rewrite {
    /// Return the rewrite in which the block gives up keys instead of being replaced for them.
    #[must_use]
    pub fn without_copy(self) -> Self {
        if self.for_key { Rewrite { shared: false, copied: false, ..self } } else { self }
    }
}

/// The step of one state group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateStep {
    /// The group of the table.
    pub group_id: u32,
    /// The place of the state before the step; None: there is none, or external tokens bring one.
    pub source: Option<u32>,
    /// The place of the state after it.
    pub target: u32,
    /// Whether a new block is written, else that of the source.
    pub takes: bool,
    /// Whether the new block begins as a copy of the source.
    pub copies: bool,
    /// Whether the source stays in the table.
    pub stays: bool,
    /// Whether another call of this batch began the step.
    pub begun: bool,
    /// Whether the source is replaced for its key alone.
    pub for_key: bool,
    /// New blocks behind the target, for the states after drafts.
    pub num_drafts: u32,
}

impl StateStep {
    /// Whether a new block replaces the source.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.takes && self.source.is_some() && !self.stays
    }

    /// Return the step in which the block gives up its key instead of being replaced for it.
    #[must_use]
    pub fn without_copy(self) -> Self {
        if self.for_key { StateStep { takes: false, copies: false, ..self } } else { self }
    }
}

/// How one group's table grows behind the hits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Growth {
    /// Number of positions that a window has skipped already.
    pub num_nulls: u32,
    /// Blocks for external tokens.
    pub num_external: u32,
    /// Blocks behind those, including preallocation.
    pub num_new: u32,
}

/// What an allocation will do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The row of the request.
    pub row: Row,
    /// Hit blocks per group, the null block if none is needed; empty if there are none.
    pub hits: Vec<Vec<BlockId>>,
    /// Computed and hit tokens.
    pub num_local: u32,
    /// With the external ones.
    pub num_loaded: u32,
    /// With the new ones.
    pub num_scheduled: u32,
    /// What falls behind a window.
    pub trims: Trims,
    /// In table order.
    pub rewrites: Vec<Rewrite>,
    /// One per group; empty if no table grows, as in most steps.
    pub growth: SmallVec<[Growth; 4]>,
    /// Of the state groups.
    pub steps: Vec<StateStep>,
}

/// An allocation that does not fit, and its window trim, which is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The row of the request.
    pub row: Row,
    /// The result of the call.
    pub refused: Refused,
    /// What falls behind a window.
    pub trims: Trims,
}
