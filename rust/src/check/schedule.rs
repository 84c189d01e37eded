// SPDX-License-Identifier: Apache-2.0
//! To come. Twin: kvcore/check/schedule.py.
