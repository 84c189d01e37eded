// SPDX-License-Identifier: Apache-2.0
//! Tests of extra_keys.rs.

use super::*;

fn item(identifier: &str, offset: u32, length: u32) -> MediaItem {
    MediaItem { identifier: identifier.to_owned(), offset, length }
}

fn media(items: &[MediaItem]) -> ExtraKeys {
    ExtraKeys { media: items.to_vec(), ..ExtraKeys::default() }
}

#[test]
fn a_media_item_is_in_the_blocks_that_have_its_tokens() {
    // Tokens 2 to 7 are an image, blocks have 4 tokens: it ends where the third starts.
    let keys = media(&[item("i", 2, 6)]);
    assert_eq!(keys.of_block(0, 4, 4), [(MEDIA, b"\x02\0\0\0i".to_vec())]);
    assert_eq!(keys.of_block(4, 8, 4), [(MEDIA, b"\xfe\xff\xff\xffi".to_vec())]);
    assert_eq!(keys.of_block(8, 12, 4), []);
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
fn a_key_has_the_form_of_its_tag() {
    assert!(is_extra_key(CACHE_SALT, b"s"));
    assert!(!is_extra_key(CACHE_SALT, b""));
    assert!(is_extra_key(CUT_EMBEDS, &[0; 4 + DIGEST_SIZE]));
    assert!(!is_extra_key(CUT_EMBEDS, &[0; 3 + DIGEST_SIZE]));
}

#[test]
fn a_cut_takes_media_and_digests_behind_it() {
    let embeds = [b"a", b"b", b"c"].map(|rows| digest_of(rows)).to_vec();
    let media_of = media(&[item("i", 1, 4), item("j", 5, 2)]);
    let whole = ExtraKeys { embeds, num_rows: 6, ..media_of };
    let cut = whole.cut(4, 2);
    assert_eq!((&cut.media[..], cut.media_cut), (&[item("i", 1, 3)][..], false));
    assert_eq!((&cut.embeds[..], cut.rows_cut), (&whole.embeds[..2], false));
    assert_eq!((whole.cut(7, 2), whole.cut(6, 2).embeds), (whole.clone(), whole.embeds.clone()));
    // Through a block: what is left of it has tags of its own, and says where it ends.
    let cut = whole.cut(3, 2);
    assert_eq!(cut.of_block(0, 2, 2), whole.of_block(0, 2, 2));
    let rest = [(CUT_MEDIA, b"\xff\xff\xff\xff\x01\0\0\0i".to_vec())];
    assert_eq!(cut.of_block(2, 4, 2)[..1], rest);
    let digest = [b"\x01\0\0\0", &whole.embeds[1][..]].concat();
    assert_eq!(cut.of_block(2, 4, 2)[1..], [(CUT_EMBEDS, digest)]);
    assert_eq!(whole.cut(5, 2).cut(3, 2), cut);
    assert_eq!(cut.cut(2, 2), whole.cut(2, 2));
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
    let value = "253 from item 0 on".to_owned();
    let error = Error::InvalidExtraKey { name: "media", expected: FEW_MEDIA, value };
    assert_eq!(read(&items, 256), Err(error));
}
