//! A forked child keeps a copy of all values, also of those that its parent revokes.
#![cfg(not(miri))]

use rustix::{
    io::read,
    pipe::pipe,
    process::{Pid, WaitOptions, waitpid},
};
use soft::{Pool, Priority, SoftList};

#[test]
fn child_keeps_values_that_its_parent_revokes() {
    let pool = Pool::new(64).unwrap();
    let list = SoftList::new(&pool, Priority(0)).unwrap();
    (0..100_u64).for_each(|value| list.push_back([value; 256]).unwrap());
    let (reader, writer) = pipe().unwrap();
    // SAFETY: the child uses only memory that no other thread locks, makes system calls, and exits.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(writer);
        // The pipe ends when the parent has revoked the values.
        let _ = read(&reader, &mut [0; 1]);
        let mut sum = 0;
        list.for_each(|value| sum += value.iter().sum::<u64>());
        // SAFETY: ends the child without destructors, which belong to the parent.
        unsafe { libc::_exit(i32::from(sum != 256 * 99 * 50)) };
    }
    assert_eq!((pool.revoke(64), list.len()), (64, 0));
    drop(writer);
    let pid = Pid::from_raw(pid).expect("fork succeeds");
    let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().expect("the child has ended");
    assert_eq!(status.exit_status(), Some(0));
}
