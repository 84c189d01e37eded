// SPDX-License-Identifier: Apache-2.0
//! How a record encodes the arguments of calls.
//!
//! A number is a varint of 7 bits a byte, the lowest first; one that may be negative is zigzagged.
//! What is no number, or is beyond 2**60, stands as -2**61 or 2**61. A request is its row and 1, or
//! 0 and its id if it is unknown. Tokens are u32. A hit is 1 and its length if it is what the last
//! look-up of the request found, else 0 and its blocks. A record by keys (names.rs) has other ids,
//! and of tokens the count. Twin: kvcore/record/fields.py.

use crate::record::names::Known;
use crate::record::pen::Pen;
use crate::state::state::State;
use crate::types::ids::BlockId;
use crate::types::keys::BlockHash;
use crate::types::slot_request::RequestedHit;
use crate::types::values::Hit;

const NEAR: u64 = 1 << 60;
const FAR: i64 = 1 << 61;

/// Tokens that were read, and whether ids below 0 are among them; None if they could not be.
pub(crate) type ReadTokens<'a> = Option<(&'a [u32], bool)>;

/// Write a number of any sign.
#[inline]
pub(crate) fn put_number(out: &mut Pen<'_>, value: i64) {
    let value = if value.unsigned_abs() < NEAR { value } else { FAR * value.signum() };
    out.put_varint((value << 1 ^ value >> 63).cast_unsigned());
}

/// Write a text.
pub(crate) fn put_text(out: &mut Pen<'_>, text: &str) {
    out.put_varint(text.len() as u64);
    out.put_all(text.as_bytes());
}

/// Write the count of some numbers, and each number.
pub(crate) fn put_numbers(out: &mut Pen<'_>, values: impl ExactSizeIterator<Item = i64>) {
    out.put_varint(values.len() as u64);
    values.for_each(|value| put_number(out, value));
}

/// Write the count of some rows, and each one's difference from the row before.
pub(crate) fn put_rows(out: &mut Pen<'_>, rows: &[u32]) {
    out.put_varint((rows.len() as u64) << 1);
    let mut last = 0;
    let changes = rows.iter().map(move |&row| {
        let change = i64::from(row) - last;
        last = row.into();
        (change << 1 ^ change >> 63).cast_unsigned()
    });
    out.put_varints(changes);
}

/// Write which request; returns its row.
#[inline(always)]
pub(crate) fn put_request(out: &mut Pen<'_>, known: Known<'_>, name: &str) -> Option<u32> {
    let row = known.row(name);
    out.put_varint(row.map_or(0, |row| u64::from(row) + 1));
    if row.is_none() {
        put_text(out, known.name(None, name));
    }
    row
}

/// The rows of requests, None if one is not known.
pub(crate) fn find_rows<T: FromIterator<u32>>(state: &State, ids: &[&str]) -> Option<T> {
    ids.iter().map(|&id| state.rows.get(id).map(|row| row.0)).collect()
}

/// Write requests: as rows if all are known, else flagged in the count, and one by one.
pub(crate) fn put_requests(out: &mut Pen<'_>, known: Known<'_>, ids: &[&str]) {
    if let Some(rows) = find_rows::<Vec<u32>>(known.state, ids) {
        return put_rows(out, &rows);
    }
    out.put_varint((ids.len() as u64) << 1 | 1);
    for id in ids {
        put_request(out, known, id);
    }
}

/// Write tokens: their count, twice, and 1 if ids below 0 are among them; or their count alone.
pub(crate) fn put_tokens(out: &mut Pen<'_>, known: Known<'_>, (tokens, signed): (&[u32], bool)) {
    if known.names.is_some() {
        return out.put_varint((tokens.len() as u64) << 1);
    }
    out.put_varint((tokens.len() as u64) << 1 | u64::from(signed));
    out.put_words(tokens);
}

/// Write the count of hashes, then 1 before each hash, or 0 if it is not a hash.
pub(crate) fn put_hashes(out: &mut Pen<'_>, hashes: &[Option<BlockHash>]) {
    out.put_varint(hashes.len() as u64);
    for hash in hashes {
        out.put(u8::from(hash.is_some()));
        out.put_all(hash.as_ref().map_or(&[], |hash| &hash[..]));
    }
}

/// Write a hit.
pub(crate) fn put_hit(out: &mut Pen<'_>, hit: &RequestedHit, last: Option<&Hit>) {
    if last.is_some_and(|last| is_same(hit, last)) {
        out.put(1);
        return out.put_varint(hit.num_tokens.cast_unsigned());
    }
    out.put(0);
    put_number(out, hit.num_tokens);
    out.put_varint(hit.blocks.len() as u64);
    for group in &hit.blocks {
        put_numbers(out, group.iter().copied());
    }
}

fn is_same(hit: &RequestedHit, last: &Hit) -> bool {
    let same = |(mine, found): (&Vec<i64>, &Vec<BlockId>)| {
        let pairs = mine.iter().zip(found);
        let differing = pairs.fold(0, |bits, (mine, found)| bits | (mine ^ i64::from(*found)));
        mine.len() == found.len() && differing == 0 // without a branch per block
    };
    let groups = &last.blocks.blocks;
    hit.num_tokens == i64::from(last.num_tokens)
        && hit.blocks.len() == groups.len()
        && hit.blocks.iter().zip(groups).all(same)
}
