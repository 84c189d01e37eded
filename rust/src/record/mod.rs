// SPDX-License-Identifier: Apache-2.0
//! The flight recorder: how calls and their outcomes stand in a record. What writes them into the
//! mapped file is in `bindings/tape.rs`.

pub(crate) mod calls;
pub(crate) mod checksum;
pub(crate) mod fields;
pub(crate) mod names;
pub(crate) mod new_request;
pub(crate) mod outcomes;
pub(crate) mod pen;
pub(crate) mod streamed;
