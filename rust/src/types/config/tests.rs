// SPDX-License-Identifier: Apache-2.0
//! What a configuration must be, with the numbers that would work.

use super::*;

#[test]
fn a_pool_smaller_than_one_request_says_how_many_are_needed() {
    let mut config = Config::new(5, 4, b"");
    assert_eq!(config.check(), Ok(()));
    config.max_model_len = Some(17);
    let message = config.check().expect_err("17 tokens need 5 blocks").to_string();
    let reason = "one request of max_model_len=17 tokens needs 5 blocks and the null block, so 6";
    assert_eq!(message, format!("config num_blocks=5: {reason}"));
}

#[test]
fn sizes_that_cannot_work_are_refused() {
    assert!(Config::new(0, 4, b"").check().is_err());
    assert!(Config::new(1, 4, b"").check().is_err());
    assert!(Config::new(2, 0, b"").check().is_err());
    let mut none = Config::new(9, 4, b"");
    none.groups.clear();
    assert!(none.check().is_err());
}
