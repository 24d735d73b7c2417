//! Rule: only the listed files contain unsafe code. Clippy checks that each unsafe block has a
//! SAFETY comment.

use super::{Violation, sources::Sources};

/// Files that may contain unsafe code, with the reason.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("benches/empty_slice.rs", "memset takes an address"),
    ("benches/frigid_predict.rs", "the library of LightGBM has a C interface"),
    ("benches/soft_memory.rs", "allocators are compared by their interface for raw memory"),
    ("crates/soft/src/heap/arena.rs", "the contents of released pages are lost"),
    ("crates/soft/src/heap/buffer.rs", "elements are in memory of the heap"),
    ("crates/soft/src/heap/bytes.rs", "values are in memory of the heap"),
    ("crates/soft/src/heap/detached.rs", "evicted bytes are in memory of the heap"),
    ("crates/soft/src/heap/mapping.rs", "mmap and madvise take addresses"),
    ("crates/soft/src/heap/pinned.rs", "pinned bytes are accessed without the lock"),
    ("crates/soft/src/heap/slots.rs", "compaction copies the bytes of values"),
    ("crates/soft/src/heap/values.rs", "values are in memory of the heap"),
    ("crates/soft-c/src/callback.rs", "callbacks are functions of C programs"),
    ("crates/soft-c/src/exports.rs", "functions of a C library are exported and take pointers"),
    ("crates/soft-c/src/fork.rs", "pthread_atfork takes a function"),
    ("crates/soft/tests/fork.rs", "fork and _exit have no safe interface"),
    ("host-agent/tests/processes/soft_client.rs", "fork has no safe interface"),
    ("host-agent/tests/processes/vmm.rs", "only the system call `exit` ends the first thread of a process"),
    ("tests/src/small_guests.rs", "the machine code of a guest is the data between two labels"),
    (
        "host-agent/src/host/memory/bus_error.rs",
        "a signal handler gets its arguments by pointer, and replaces a lost mapping",
    ),
    ("host-agent/src/host/memory/mapped.rs", "non-temporal access to device memory takes addresses"),
    ("host-agent/src/host/memory/numa.rs", "mbind, madvise and move_pages take addresses"),
    (
        "host-agent/src/host/slices/detached.rs",
        "a thread that may block in the kernel unshares the file descriptor table",
    ),
    ("host-agent/src/readiness.rs", "the caller of tokio guarantees that a registered descriptor stays open"),
    ("vmm-plugin/src/confine/sigsys.rs", "a signal handler gets its arguments by pointer"),
    ("vmm-plugin/src/exit.rs", "a signal handler may end the process only with _exit"),
    ("vmm-plugin/src/memory.rs", "KVM and mmap take addresses"),
    ("vmm-plugin/src/memory/accessed.rs", "madvise takes addresses"),
    ("vmm-plugin/src/memory/pool_region.rs", "KVM and mmap take addresses"),
    ("vmm-plugin/src/vcpu/test_guest.rs", "the machine code of a guest is the data between two labels"),
    ("vmm-plugin/src/memory/fault.rs", "a signal handler gets its arguments by pointer"),
    ("vmm-plugin/src/vcpu/mce.rs", "kvm-ioctls lacks the machine-check ioctls of KVM"),
    ("vmm-plugin/src/tap.rs", "an ioctl sets the name of a tap device"),
];

/// Reports unsafe code in files that are not listed.
pub fn check_unsafe_code(sources: &Sources) -> Vec<Violation> {
    let others = sources.rust.iter().filter(|file| !UNSAFE_FILES.iter().any(|(path, _)| file.path == *path));
    let violations = others.filter_map(|file| {
        let (line, _) = file.identifiers().into_iter().find(|(_, ident)| ident == "unsafe")?;
        Some(Violation {
            path: file.path.clone(),
            line,
            message: "unsafe code is not allowed in this file".to_owned(),
            fix: "use a safe interface, or add the file to UNSAFE_FILES in xtask/src/tidy/unsafety.rs",
        })
    });
    violations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn unsafe_code_in_unlisted_file_is_reported() {
        let safe = ("a.rs", "//! A.\n#![forbid(unsafe_code)]\n// unsafe\n");
        let not = ("b.rs", "//! B.\nfn b() {\n    unsafe { c() }\n}\n");
        assert_eq!(locations(&check_unsafe_code(&sources(&[safe, not]))), ["b.rs:3"]);
    }
}
