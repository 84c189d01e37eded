// SPDX-License-Identifier: Apache-2.0
//! What errors say.

use super::*;
use crate::types::error_fields::bytes_repr;

#[test]
fn message_names_the_thing_and_the_numbers() {
    let error = Error::DoubleFree { block: 3, ref_count: 1, requested: 2 };
    assert_eq!(error.to_string(), "block 3 has 1 owners, but the call releases 2");
    assert_eq!(error.name(), "DoubleFree");
    let fields = [("block", 3), ("ref_count", 1), ("requested", 2)];
    assert_eq!(error.fields(), fields.map(|(name, value)| (name, Field::Int(value))));
}

#[test]
fn lists_read_as_in_python() {
    let requests = vec!["a".to_owned(), "b".to_owned()];
    let error = Error::HitInOpenBatch { blocks: vec![1, 2], requests };
    let message = error.to_string();
    assert!(message.starts_with("blocks [1, 2] were"), "{message}");
    assert!(message.contains("requests ['a', 'b']: free"), "{message}");
}

#[test]
fn an_id_is_shown_as_a_python_literal() {
    assert_eq!(repr("r1"), "'r1'");
    assert_eq!(repr("it's"), "\"it's\"");
    assert_eq!(repr("a'b\"c\n\u{1}\\"), r#"'a\'b"c\n\x01\\'"#);
    assert_eq!(bytes_repr(b"it's\x00\xff"), "b\"it's\\x00\\xff\"");
    assert_eq!(bytes_repr(b"'\"\\\n"), r#"b'\'"\\\n'"#);
    assert_eq!(repr("e\u{301} \u{ad}\u{200b}\u{e0001}"), "'e\u{301} \\xad\\u200b\\U000e0001'");
}
