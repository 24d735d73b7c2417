//! Blocking client of a host agent's socket, through which a VMM obtains the memory of its VM. The
//! VMM, the command line and the agent's tests use it without depending on each other. Mapping the
//! memory is up to the caller.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use host_memory::Client;
//! use proto::v1::MemoryForm;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect(Path::new("/run/tarn/host-memory.sock"))?;
//! let memory = client.attach("vm-1", MemoryForm::Descriptors)?;
//! for region in memory.regions {
//!     println!("{} bytes at offset {}", region.bytes, region.offset);
//!     let file = region.into_file()?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Without an agent, connecting fails at once:
//!
//! ```
//! use std::path::Path;
//!
//! use host_memory::Client;
//!
//! let error = Client::connect(Path::new("/nonexistent/host-memory.sock")).unwrap_err();
//! assert_eq!(error.to_string(), "cannot connect to the host agent");
//! ```

#![forbid(unsafe_code)]

pub mod datagram;

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use prost::Message as _;
use proto::v1::{self as wire, host_memory_reply::Reply, host_memory_request::Request};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};
use units::limits::{DATAGRAM_BYTES_MAX, RESPONSE_TIMEOUT_DEFAULT, SLICES_PER_VM_MAX};

/// Connection to the agent of this host.
#[derive(Debug)]
pub struct Client(OwnedFd);

/// Memory of a VM.
#[derive(Debug)]
pub struct VmMemory {
    /// Local memory, followed by slices in order.
    pub regions: Vec<Region>,
    /// Whether its pages must not be moved.
    pub pinned: bool,
}

/// Region of a VM's memory.
#[derive(Debug)]
pub struct Region {
    /// Slice number and owner epoch; `None` for local memory.
    pub slice: Option<(u32, u64)>,
    /// Name of the EMC; empty for local memory.
    pub emc: String,
    /// Length, in bytes.
    pub bytes: u64,
    /// Offset in the backing, in bytes.
    pub offset: u64,
    /// Backing of the region.
    pub backing: RegionBacking,
}

impl Region {
    fn of(region: wire::Region, backing: RegionBacking) -> Self {
        let wire::Region { slice, emc, epoch, bytes, offset, .. } = region;
        Self { slice: slice.map(|slice| (slice, epoch)), emc, bytes, offset, backing }
    }

    /// Opens the backing for reading and writing.
    ///
    /// # Errors
    /// The error of opening the path, or `NotFound` if the VMM allocates the region itself.
    pub fn into_file(self) -> io::Result<File> {
        match self.backing {
            RegionBacking::Descriptor(descriptor) => Ok(File::from(descriptor)),
            RegionBacking::Path(path) => OpenOptions::new().read(true).write(true).open(path),
            RegionBacking::VmmAllocated => {
                Err(io::Error::new(io::ErrorKind::NotFound, "the VMM allocates this region itself"))
            }
        }
    }
}

/// Backing of a region.
#[derive(Debug)]
pub enum RegionBacking {
    /// The file of this descriptor.
    Descriptor(OwnedFd),
    /// The file at this path.
    Path(PathBuf),
    /// None: the VMM allocates the memory.
    VmmAllocated,
}

/// Error of a request to the host agent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed or the agent closed the connection.
    #[error("cannot {operation} the host agent")]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The agent rejected the request.
    #[error("host agent rejected the request: {message} ({reason})")]
    Rejected {
        /// Machine-readable reason: VM_UNKNOWN (also for a VM of another user), VM_NOT_READY,
        /// VM_ATTACHED, OTHER_VM, PEER_NOT_ALLOWED or BAD_MESSAGE.
        reason: String,
        /// Explanation for people.
        message: String,
    },
    /// The agent sent a reply that violates the protocol.
    #[error("invalid reply from the host agent: {0}")]
    InvalidReply(String),
}

fn io_error(operation: &'static str) -> impl FnOnce(io::Error) -> ClientError {
    move |source| ClientError::Io { operation, source }
}

fn invalid_reply(problem: impl Into<String>) -> ClientError {
    ClientError::InvalidReply(problem.into())
}

impl Client {
    /// Connects to an agent's socket. Requests time out after [`RESPONSE_TIMEOUT_DEFAULT`].
    ///
    /// # Errors
    /// [`ClientError::Io`] if no agent listens there.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let connected = || -> io::Result<OwnedFd> {
            let client = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            connect(&client, &SocketAddrUnix::new(socket)?)?;
            let within = RESPONSE_TIMEOUT_DEFAULT.as_duration();
            set_socket_timeout(&client, Timeout::Recv, Some(within))?;
            set_socket_timeout(&client, Timeout::Send, Some(within))?;
            Ok(client)
        };
        connected().map(Self).map_err(io_error("connect to"))
    }

    /// Attaches this process to a VM and returns the VM's memory. May be repeated.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub fn attach(&self, vm: &str, form: wire::MemoryForm) -> Result<VmMemory, ClientError> {
        self.send(Request::Attach(wire::Attach { vm: vm.to_owned(), form: form.into() }))?;
        self.memory(VmMemory::add)
    }

    /// Returns the memory of a VM without attaching to it: slices with their paths, and the size of
    /// local memory.
    ///
    /// # Errors
    /// Any [`ClientError`], under the same conditions as [`Client::attach`].
    pub fn inspect(&self, vm: &str) -> Result<VmMemory, ClientError> {
        self.send(Request::Inspect(wire::Inspect { vm: vm.to_owned() }))?;
        self.memory(VmMemory::add_inspected)
    }

    fn memory(
        &self,
        add: impl Fn(&mut VmMemory, Vec<wire::Region>, Vec<OwnedFd>) -> Result<(), ClientError>,
    ) -> Result<VmMemory, ClientError> {
        let mut memory = VmMemory { regions: Vec::new(), pinned: false };
        // Each message except the last carries at least one region; one region is local memory.
        for _ in 0..SLICES_PER_VM_MAX + 2 {
            let (reply, descriptors) = self.receive()?;
            let Reply::Memory(piece) = reply else { return Err(invalid_reply("expected a memory message")) };
            add(&mut memory, piece.regions, descriptors)?;
            memory.pinned = piece.pinned;
            if !piece.more {
                return Ok(memory);
            }
        }
        Err(invalid_reply("more messages than a VM can have regions"))
    }

    fn send(&self, request: Request) -> Result<(), ClientError> {
        let bytes = wire::HostMemoryRequest { request: Some(request) }.encode_to_vec();
        self.send_bytes(&bytes)
    }

    fn send_bytes(&self, bytes: &[u8]) -> Result<(), ClientError> {
        let none: &[Arc<OwnedFd>] = &[];
        datagram::send(&self.0, bytes, none).map_err(io_error("send to"))
    }

    fn receive(&self) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        let received =
            datagram::receive_descriptors(&self.0, &mut buffer).map_err(io_error("receive from"))?;
        let (bytes, descriptors) =
            received.ok_or_else(|| invalid_reply("datagram or descriptors truncated"))?;
        if bytes == 0 {
            return Err(io_error("receive from")(io::ErrorKind::UnexpectedEof.into()));
        }
        let reply = wire::HostMemoryReply::decode(&buffer[..bytes])
            .map_err(|error| invalid_reply(error.to_string()))?;
        match reply.reply {
            Some(Reply::Rejection(wire::Rejection { reason, message })) => {
                Err(ClientError::Rejected { reason, message })
            }
            Some(reply) => Ok((reply, descriptors)),
            None => Err(invalid_reply("message without content")),
        }
    }
}

impl VmMemory {
    /// Adds the regions of a message. Its descriptors belong, in order, to the regions without a
    /// path.
    fn add(&mut self, regions: Vec<wire::Region>, descriptors: Vec<OwnedFd>) -> Result<(), ClientError> {
        let mut descriptors = descriptors.into_iter();
        for region in regions {
            let next = || descriptors.next().map(RegionBacking::Descriptor);
            let backing = path_of(&region)
                .or_else(next)
                .ok_or_else(|| invalid_reply("missing descriptor for a region"))?;
            self.regions.push(Region::of(region, backing));
        }
        if descriptors.next().is_some() {
            Err(invalid_reply("more descriptors than regions"))
        } else {
            Ok(())
        }
    }

    /// Adds the regions of an inspection: slices have paths, local memory has no backing yet, and
    /// there are no descriptors.
    fn add_inspected(
        &mut self,
        regions: Vec<wire::Region>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ClientError> {
        for region in regions {
            let own = region.slice.is_none().then_some(RegionBacking::VmmAllocated);
            let backing =
                path_of(&region).or(own).ok_or_else(|| invalid_reply("missing path for a slice"))?;
            self.regions.push(Region::of(region, backing));
        }
        if descriptors.is_empty() { Ok(()) } else { Err(invalid_reply("more descriptors than regions")) }
    }
}

fn path_of(region: &wire::Region) -> Option<RegionBacking> {
    (!region.path.is_empty()).then(|| RegionBacking::Path(region.path.clone().into()))
}
