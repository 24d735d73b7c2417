//! Client of soft memory, for tests. It reads requests from its standard input, one per line, and prints one line for
//! each reply. It ends when its input is closed.
//!
//! The first argument is the daemon's socket. With the further arguments `user UID`, the process becomes another user
//! before it connects.
//!
//! Requests:
//! - `push N`: adds up to N values of 4 KiB to a list, and prints how many were added
//! - `use N`: touches N pages of ordinary memory
//! - `give-back`: gives unused budget back
//! - `stats`: prints the budget, the held pages, and the number of evicted values
//! - `fork`: starts a child that ends with its input, and prints its process ID

use std::{
    io::{self, BufRead as _, Write as _},
    path::Path,
    sync::Arc,
};

use rustix::{
    process::{Gid, Uid},
    thread::{set_thread_res_gid, set_thread_res_uid},
};
use soft::{Pool, Priority, SoftList};

/// Largest budget of the pool in pages: 4 GiB.
const BUDGET_MAX: usize = 1 << 20;

type Value = [u8; 4096];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let socket = Path::new(arguments.first().ok_or("missing argument: socket")?);
    if let [_, user, uid] = &arguments[..]
        && user == "user"
    {
        switch_user(uid.parse()?)?;
    }
    let pool = soft::client::connect(socket, BUDGET_MAX)?;
    println!("connected");
    let list: SoftList<Value> = SoftList::new(&pool, Priority(1))?;
    let mut touched: Vec<Vec<u8>> = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["push", count] => println!("{}", push(&list, count.parse()?)),
            ["use", pages] => {
                touched.push(vec![1; pages.parse::<usize>()? * soft::PAGE_BYTES]);
                println!("{}", touched.len());
            }
            ["give-back"] => println!("{}", pool.give_back_unused()),
            ["stats"] => println!("{}", stats(&pool, &list)),
            ["fork"] => fork(&pool, &list)?,
            _ => return Err(format!("unknown request: {line}").into()),
        }
    }
    Ok(())
}

fn push(list: &SoftList<Value>, count: usize) -> usize {
    (0..count).take_while(|_| list.push_back([1; 4096]).is_ok()).count()
}

fn stats(pool: &Arc<Pool>, list: &SoftList<Value>) -> String {
    let stats = pool.stats();
    format!("{} {} {}", stats.budget, stats.held, list.usage().evicted)
}

/// Starts a child, which tries to use the pool of its parent.
fn fork(pool: &Arc<Pool>, list: &SoftList<Value>) -> io::Result<()> {
    // SAFETY: the other thread holds no lock of this process while it waits for messages, and the child only uses
    // the pool and the standard output.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let before = pool.stats().budget;
            let pushed = push(list, before + 1000);
            let given_back = pool.give_back_unused();
            println!("child {} {pushed} {given_back}", std::process::id());
            io::stdout().flush()?;
            let mut line = String::new();
            io::stdin().lock().read_line(&mut line)?;
            std::process::exit(0);
        }
        _ => Ok(()),
    }
}

fn switch_user(uid: u32) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}
