// SPDX-License-Identifier: Apache-2.0
//! The checker: every state of a small world, over the twin's own transitions.
//!
//! Rules: there is no second model. What a call must be given is enumerated by `actions.rs`, made
//! by `calls.rs`, judged by the files of properties, folded by `canonical.rs` and led by
//! `search.rs`. Nothing here is called by a transition. The same worlds give the same counts of
//! states and edges, and the same names of properties, as kvcore/check/*.py.

pub mod calls;
pub mod closure;
pub mod fair;
pub mod flight_invariants;
pub mod forward;
pub mod ghost;
pub mod hazards;
pub mod invariants;
#[cfg(test)]
mod judged;
#[cfg(test)]
mod judged_calls;
#[cfg(test)]
mod judged_progress;
pub mod mirror;
pub mod outcomes;
pub mod prefixes;
pub mod progress;
pub mod request_invariants;
pub mod same;
pub mod schedule;
pub mod transitions;
pub mod world;

use std::collections::BTreeSet;
use std::fmt;

/// A property that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The name, as in docs/invariants.md.
    pub property: &'static str,
    /// What was found.
    pub detail: String,
}

impl Violation {
    /// The violation of the property of this name.
    #[must_use]
    pub fn new(property: &'static str, detail: String) -> Self {
        Violation { property, detail }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.property, self.detail)
    }
}

/// The properties that count; all unless some are named.
#[derive(Debug, Clone, Default)]
pub struct Judges {
    named: Option<BTreeSet<String>>,
}

impl Judges {
    /// These properties alone.
    #[must_use]
    pub fn only(names: impl IntoIterator<Item = String>) -> Self {
        Judges { named: Some(names.into_iter().collect()) }
    }

    /// Whether a property counts.
    #[must_use]
    pub fn count(&self, property: &str) -> bool {
        self.named.as_ref().is_none_or(|names| names.contains(property))
    }

    /// A judgement, with what does not count left out.
    pub fn hear(&self, judged: Result<(), Violation>) -> Result<(), Violation> {
        judged.or_else(|found| if self.count(found.property) { Err(found) } else { Ok(()) })
    }
}
