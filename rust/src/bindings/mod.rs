// SPDX-License-Identifier: Apache-2.0
//! Python bindings of the twin: they convert and delegate, and hold no policy.
//!
//! `arguments` and `tokens` read arguments, `values` makes results, `errors` makes errors. Nothing
//! else in the crate knows Python.

mod ahead;
mod arguments;
mod check;
mod check_calls;
mod check_state;
mod classes;
mod errors;
mod extra_keys;
mod hashing;
#[cfg(feature = "stubs")]
mod hints;
mod lists;
mod manager;
mod mapped;
mod methods;
#[cfg(feature = "mutants")]
mod mutants;
mod queries;
mod recording;
mod requests;
mod retention;
mod sanitizer;
mod slot_requests;
mod tables;
mod tape;
mod tiers;
mod tiers_dump;
mod tokens;
mod values;

/// The compiled twin of the Python core.
#[pyo3::pymodule(gil_used = false)]
mod _rust {
    #[pymodule_export]
    use super::check::{check_states, check_world};
    #[pymodule_export]
    use super::check_state::check_state;
    #[pymodule_export]
    use super::hashing::{hash_block, hash_blocks, root_hash};
    #[pymodule_export]
    use super::manager::Manager;
    #[cfg(feature = "mutants")]
    #[pymodule_export]
    use super::mutants::seed;
    #[pymodule_export]
    use super::queries::lost_keys::LostKeys;
    #[pymodule_export]
    use super::recording::crc32c;
    #[pymodule_export]
    use super::sanitizer::SlotChecker;
    #[pymodule_export]
    use super::tiers::Tiers;
}
