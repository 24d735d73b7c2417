//! `soft-cache`: cache in soft memory for clients of the Redis protocol.
//!
//! One thread executes all commands, each without interruption. Revocations of memory run on other threads.

mod answer;
mod call;
mod commands;
mod connection;
mod error;
mod integer;
mod listener;
mod memory;
mod options;
mod password;
mod reply;
mod request;
mod server;
mod session;
mod size;
mod store;
mod value;

use std::{error::Error, process::ExitCode, sync::Arc};

use clap::Parser as _;
use service_files::descriptors;
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::{MissedTickBehavior, interval, timeout},
};
use units::{
    chain,
    limits::{SOFT_CACHE_EXPIRY_INTERVAL, SOFT_CACHE_EXPIRY_PAGES, SOFT_CACHE_SHUTDOWN_TIMEOUT},
};

use crate::{
    listener::Listener,
    memory::Memory,
    options::{Args, Options},
    password::Password,
    server::{Server, unix_now},
    store::ExpirySearch,
};

fn main() -> ExitCode {
    let args = Args::parse();
    let started = args.log.start().map_err(|error| format!("RUST_LOG: {error}").into());
    match started.and_then(|()| run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<(), Box<dyn Error>> {
    let options = args.check()?;
    descriptors::raise_limit();
    let password = options.password_file.as_deref().map(Password::read).transpose()?;
    let memory = match &options.daemon {
        Some(socket) => Memory::from_daemon(socket, options.pages)?,
        None => Memory::constant(options.pages)?,
    };
    let server = Arc::new(Server::new(memory, password, options.clients_max)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(serve(&options, &server));
    // A revocation may still run on another thread.
    runtime.shutdown_background();
    result
}

/// Serves clients until SIGTERM or SIGINT.
async fn serve(options: &Options, server: &Arc<Server>) -> Result<(), Box<dyn Error>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut listeners = Vec::new();
    if let Some(address) = options.listen {
        listeners.push(Listener::tcp(address).await?);
    }
    let mut socket_file = None;
    if let Some((path, mode)) = &options.unix_socket {
        let (listener, file) = Listener::unix(path, *mode)?;
        listeners.push(listener);
        socket_file = Some(file);
    }
    let mut tasks: JoinSet<()> =
        listeners.into_iter().map(|listener| listener.accept_clients(server.clone())).collect();
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        never = run_in_background(server) => match never {},
    }
    server.memory.log_connection(); // it may have changed since the last step
    tracing::info!("stopping");
    server.stop();
    let ended = timeout(SOFT_CACHE_SHUTDOWN_TIMEOUT.as_duration(), async {
        while tasks.join_next().await.is_some() {}
    });
    if ended.await.is_err() {
        tracing::warn!(clients = server.clients(), "closing connections that did not accept their replies");
    }
    if let Some(file) = socket_file {
        file.remove();
    }
    Ok(())
}

/// Removes expired values, and logs changes of the connection to the daemon.
async fn run_in_background(server: &Server) -> std::convert::Infallible {
    let mut steps = interval(SOFT_CACHE_EXPIRY_INTERVAL.as_duration());
    steps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut search = ExpirySearch::default();
    loop {
        steps.tick().await;
        server.memory.log_connection();
        server.store.expire_step(&mut search, SOFT_CACHE_EXPIRY_PAGES, unix_now());
    }
}
