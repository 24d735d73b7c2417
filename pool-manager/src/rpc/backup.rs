//! Online backup of the store. A snapshot is copied into a file, and the file is sent to the client
//! in chunks.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    pin::Pin,
    time::Duration,
};

use proto::v1 as wire;
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Code, Status};
use units::limits::STORE_FREE_BYTES_MIN;

use super::{
    ServiceContext,
    status::{driver_error_status, error_status, resource_exhausted},
};
use crate::store::{
    Scan,
    backup::{self, BackupError},
    disk,
};

/// Stream of the chunks of a backup file.
pub type ChunkStream = Pin<Box<dyn Stream<Item = Result<wire::BackupChunk, Status>> + Send>>;

/// Size of a chunk, in bytes; well below the size limit of a gRPC message.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum number of chunks queued for a client.
const CHUNKS_QUEUED_MAX: usize = 4;
/// Maximum time that a client may take to accept a chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(60);
/// Name of the temporary backup file in the store's directory. The file is unlinked before it is
/// sent.
const BACKUP_TEMPORARY_FILE: &str = "backup.outgoing";

/// Starts a backup of the store, and returns the stream of its chunks.
///
/// # Errors
/// RESOURCE_EXHAUSTED (BACKUP_IN_PROGRESS) during another backup, UNAVAILABLE if the manager is
/// stopping.
pub async fn start(shared: &ServiceContext) -> Result<ChunkStream, Status> {
    let permit = shared.backups.clone().try_acquire_owned();
    let permit = permit.map_err(|_| {
        resource_exhausted("BACKUP_IN_PROGRESS", "another backup is in progress: try again later".into())
    })?;
    let snapshot = shared.driver.snapshot().await.map_err(driver_error_status)?;
    let (folder, runtime) = (shared.folder.clone(), Handle::current());
    let (sender, receiver) = mpsc::channel(CHUNKS_QUEUED_MAX);
    tokio::task::spawn_blocking(move || {
        if let Err(status) = send(snapshot, &folder, &runtime, &sender, permit) {
            let _ = sender.blocking_send(Err(status)); // the client may have disconnected
        }
    });
    Ok(Box::pin(ReceiverStream::new(receiver)))
}

fn send(
    mut snapshot: Box<dyn Scan>,
    folder: &Path,
    runtime: &Handle,
    sender: &mpsc::Sender<Result<wire::BackupChunk, Status>>,
    _permit: OwnedSemaphorePermit,
) -> Result<(), Status> {
    let mut file = copy_to_file(snapshot.as_mut(), folder).map_err(|error| {
        let message = format!("backup: {}", units::chain(&error));
        tracing::warn!(error = units::chain(&error), "backup failed");
        error_status(Code::Internal, "BACKUP_FAILED", message)
    })?;
    drop(snapshot); // lets the store reuse the pages of the snapshot
    let mut total_bytes = 0;
    loop {
        let mut data = Vec::with_capacity(CHUNK_BYTES);
        let read = file.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut data);
        read.map_err(|error| {
            error_status(Code::Internal, "BACKUP_FAILED", format!("backup: cannot read the copy: {error}"))
        })?;
        total_bytes += data.len() as u64;
        let is_last = data.is_empty();
        let chunk = wire::BackupChunk { data, total_bytes: is_last.then_some(total_bytes) };
        let sent = runtime.block_on(tokio::time::timeout(CHUNK_TIMEOUT, sender.send(Ok(chunk))));
        if is_last || !matches!(sent, Ok(Ok(()))) {
            return Ok(()); // the file is sent, or the client disconnected or is too slow
        }
    }
}

fn copy_to_file(snapshot: &mut dyn Scan, folder: &Path) -> Result<File, BackupError> {
    let path = folder.join(BACKUP_TEMPORARY_FILE);
    let io = |operation| {
        let path = path.clone();
        move |errno| BackupError::Io { operation, path, errno }
    };
    backup::remove_if_exists(&path)?; // a killed manager leaves this file
    check_disk_space(folder).map_err(io("create"))?;
    backup::backup(snapshot, &path)?;
    let file = File::open(&path).map_err(io("open"))?;
    fs::remove_file(&path).map_err(io("remove"))?;
    Ok(file)
}

/// Checks that the disk has enough free space for the copy and for later writes of the ledger.
fn check_disk_space(folder: &Path) -> io::Result<()> {
    let free = disk::free_bytes_at(folder)?;
    let ledger = match fs::metadata(folder.join(disk::DATABASE_FILE)) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => 0, // the ledger is in etcd
        ledger => ledger?.len(),
    };
    let needed = ledger.saturating_add(2 * STORE_FREE_BYTES_MIN);
    if free < needed {
        let problem = format!("{free} bytes are free, {needed} are needed for the copy");
        return Err(io::Error::new(io::ErrorKind::StorageFull, problem));
    }
    Ok(())
}
