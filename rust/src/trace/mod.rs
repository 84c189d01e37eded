// SPDX-License-Identifier: Apache-2.0
//! Text traces, run in tests.

pub(crate) mod runner;
pub(crate) mod text;
pub(crate) mod trace_file;
