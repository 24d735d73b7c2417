//! Panics of code of the program that soft memory calls.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of the program, and returns the number of panics, 0 or 1. The code owns its values, and the caller holds
/// no lock, so a panic leaves no state inconsistent.
pub(crate) fn count_panics(code: impl FnOnce()) -> u64 {
    let Err(payload) = catch_unwind(AssertUnwindSafe(code)) else { return 0 };
    // The destructor of the payload can panic again. The payload of that panic is leaked.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(payload);
    }
    1
}

#[cfg(test)]
mod tests {
    use std::{panic::panic_any, sync::Arc};

    use super::*;

    #[test]
    fn payload_of_a_panic_is_dropped() {
        let payload = Arc::new(());
        let thrown = payload.clone();
        assert_eq!((count_panics(|| panic_any(thrown)), count_panics(|| ())), (1, 0));
        assert_eq!(Arc::strong_count(&payload), 1);
    }

    #[test]
    fn panic_of_the_destructor_of_a_payload_is_caught() {
        struct Payload;
        impl Drop for Payload {
            fn drop(&mut self) {
                panic!("destructor of the payload");
            }
        }
        assert_eq!(count_panics(|| panic_any(Payload)), 1);
    }
}
