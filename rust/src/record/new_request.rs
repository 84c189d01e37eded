// SPDX-License-Identifier: Apache-2.0
//! How a record encodes a request that is added: its id, its tokens, and a bit set of its parts.
//!
//! A record by keys has none of the parts from which keys are made, except those of a tenant.
//! Twin: kvcore/record/new_request.py.

use crate::record::fields::{put_hashes, put_text, put_tokens};
use crate::record::names::{Known, salt_of};
use crate::record::pen::Pen;
use crate::types::extra_inputs::GivenKeys;
use crate::types::retention::{Piece, Wish};
use crate::types::values::Request;

const LORA: u64 = 1;
const MEDIA: u64 = 2;
const SALT: u64 = 4;
const EMBEDS: u64 = 8;
const HASHES: u64 = 16;
const SKIP: u64 = 32;
const LEVELS: u64 = 64;

/// Write a request that is added.
pub(crate) fn put_new_request(
    out: &mut Pen<'_>,
    known: Known<'_>,
    request: &Request<'_>,
    tokens: (&[u32], bool),
) {
    let (id, mut keys) = (request.request_id, &request.extra_keys);
    put_text(out, known.name(known.row(id), id));
    put_tokens(out, known, tokens);
    let (salt, of_tenant);
    if known.names.is_some() {
        salt = salt_of(&known.state.config, keys.cache_salt);
        of_tenant = GivenKeys { cache_salt: salt.as_deref(), ..GivenKeys::default() };
        keys = &of_tenant;
    }
    let parts = [
        (LORA, keys.lora.is_some()),
        (MEDIA, !keys.media.is_empty()),
        (SALT, keys.cache_salt.is_some()),
        (EMBEDS, keys.prompt_embeds.is_some()),
        (HASHES, request.block_hashes.is_some()),
        (SKIP, request.skip_reading_prefix_cache),
        (LEVELS, request.retention.is_some()),
    ];
    out.put_varint(parts.iter().map(|(bit, is_there)| bit * u64::from(*is_there)).sum());
    if let Some(lora) = &keys.lora {
        put_text(out, &lora.name);
        put_text(out, &lora.path);
    }
    if !keys.media.is_empty() {
        out.put_varint(keys.media.len() as u64);
    }
    for item in &keys.media {
        put_text(out, &item.identifier);
        out.put_varint(item.offset.into());
        out.put_varint(item.length.into());
    }
    if let Some(salt) = keys.cache_salt {
        put_text(out, salt);
    }
    if let Some(embeds) = &keys.prompt_embeds {
        out.put_varint(embeds.bytes_per_token.into());
        out.put_varint(embeds.data.len() as u64);
        out.put_all(embeds.data);
    }
    if let Some(hashes) = &request.block_hashes {
        put_hashes(out, hashes);
    }
    if let Some(pieces) = &request.retention {
        put_retention(out, pieces);
    }
}

/// Write the ranges of a retention wish (start, end, level, ms), and those of decoded tokens.
pub(crate) fn put_retention(out: &mut Pen<'_>, pieces: &[Piece]) {
    let Some(((_, _, decoded), ranges)) = pieces.split_last() else { return };
    out.put_varint(ranges.len() as u64);
    for (start, end, wish) in ranges {
        out.put_varint((*start).into());
        out.put_varint(end.unwrap_or(0).into());
        put_wish(out, wish);
    }
    put_wish(out, decoded);
}

fn put_wish(out: &mut Pen<'_>, wish: &Wish) {
    out.put_varint(if wish.duration > 0 { wish.level } else { wish.base }.into());
    out.put_varint(wish.duration);
}
