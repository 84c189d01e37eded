// SPDX-License-Identifier: Apache-2.0
//! What a check finds: a property that does not hold, and which properties count.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

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
pub struct Checks {
    named: Option<Arc<BTreeSet<String>>>,
}

impl Checks {
    /// These properties alone.
    #[must_use]
    pub fn only(names: impl IntoIterator<Item = String>) -> Self {
        Checks { named: Some(Arc::new(names.into_iter().collect())) }
    }

    /// Whether a property counts.
    #[must_use]
    pub fn count(&self, property: &str) -> bool {
        self.named.as_ref().is_none_or(|names| names.contains(property))
    }

    /// Whether a property was requested by name.
    #[must_use]
    pub fn named(&self, property: &str) -> bool {
        self.named.as_ref().is_some_and(|names| names.contains(property))
    }

    /// A finding, with what does not count left out.
    pub fn hear(&self, found: Result<(), Violation>) -> Result<(), Violation> {
        found.or_else(|found| if self.count(found.property) { Err(found) } else { Ok(()) })
    }

    /// A finding as the violation of a property, with what does not count left out.
    pub fn hear_finding(&self, property: &'static str, found: Finding) -> Result<(), Violation> {
        self.hear(found.map_err(|detail| Violation::new(property, detail)))
    }
}

/// What is wrong, in words.
pub type Finding = Result<(), String>;
