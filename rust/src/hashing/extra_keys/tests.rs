// SPDX-License-Identifier: Apache-2.0
//! Tests of extra_keys.rs.

use super::*;
use crate::types::extra_inputs::{CACHE_SALT, LORA, LoRA, MEDIA, PROMPT_EMBEDS};

fn item(identifier: &str, offset: u32, length: u32) -> MediaItem {
    MediaItem { identifier: identifier.to_owned(), offset, length }
}

fn media(items: &[MediaItem]) -> ExtraKeys {
    ExtraKeys { media: items.to_vec(), ..ExtraKeys::default() }
}

#[test]
fn the_kinds_of_keys_come_in_a_fixed_order() {
    let given = GivenKeys {
        lora: Some(LoRA { name: "n".to_owned(), path: "p".to_owned() }),
        media: vec![item("i", 0, 1)],
        cache_salt: Some("s"),
        prompt_embeds: Some(PromptEmbeds { data: b"abc", bytes_per_token: 1 }),
    };
    let keys = read_extra_keys("a", given, 3, 2).unwrap();
    let tags = |start, end| -> Vec<u8> {
        keys.of_block(start, end, 2).iter().map(|(tag, _)| *tag).collect()
    };
    assert_eq!(tags(0, 2), [LORA, MEDIA, CACHE_SALT, PROMPT_EMBEDS]);
    assert_eq!(tags(2, 4), [LORA, PROMPT_EMBEDS]);
    assert_eq!(tags(0, 4), [LORA, MEDIA, CACHE_SALT, PROMPT_EMBEDS, PROMPT_EMBEDS]);
    assert_eq!(keys.of_block(0, 2, 2)[0].1, b"\x01\0\0\0np");
    assert_eq!(keys.embeds, [digest_of(b"ab"), digest_of(b"c")]);
    assert_eq!(keys.of_block(4, 6, 2)[1].1, digest_of(b""));
}

#[test]
fn each_block_has_room_for_the_most_items() {
    let (most, num_tokens) = (MAX_MEDIA as u32, 2 * MAX_MEDIA as u32);
    let read = |block_size| {
        let media = (0..num_tokens).map(|offset| item("i", offset, 1)).collect();
        read_extra_keys("a", GivenKeys { media, ..GivenKeys::default() }, num_tokens, block_size)
    };
    assert!(read(most).is_ok());
    assert!(read(most + 1).is_err());
}

#[test]
fn a_block_counts_its_keys_in_a_byte() {
    let items: Vec<_> = (0..253).map(|offset| item("i", offset, 1)).collect();
    let read = |media: &[MediaItem], block_size| {
        let given = GivenKeys { media: media.to_vec(), ..GivenKeys::default() };
        read_extra_keys("a", given, 300, block_size)
    };
    assert_eq!(read(&items[1..], 256), Ok(media(&items[1..])));
    assert_eq!(read(&items, 252), Ok(media(&items)));
    let name = "the number of media items in the block where item 252 begins".to_owned();
    let error = Error::InvalidExtraKey { name, expected: FEW_MEDIA, value: 253_i64.into() };
    assert_eq!(read(&items, 256), Err(error));
}
