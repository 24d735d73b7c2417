//! Blocking client of the host agent's memory socket, through which a VMM obtains the memory of its
//! VM. The VMM, the command-line tool and the tests of the agent use this client. The caller maps
//! the memory.
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
//! If no agent is running, connecting fails immediately:
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

/// Connection to the host agent.
#[derive(Debug)]
pub struct Client(OwnedFd);

/// Memory of a VM, as reported by the host agent.
#[derive(Debug)]
pub struct VmMemory {
    /// Local memory, if the VM has any, followed by the slices in the order in which the agent sent
    /// them.
    pub regions: Vec<Region>,
    /// Whether the pages of the VM are pinned and must not be moved.
    pub pinned: bool,
}

/// Contiguous region of a VM's memory: local memory or a slice.
#[derive(Debug)]
pub struct Region {
    /// Number and owner epoch of the slice. `None` for local memory.
    pub slice: Option<(u32, u64)>,
    /// Name of the EMC that contains the slice. Empty for local memory.
    pub emc: String,
    /// Length of the region, in bytes.
    pub bytes: u64,
    /// Offset of the region in the backing file, in bytes.
    pub offset: u64,
    /// Number of bytes after the region in its file that are reserved for moving the VM's pool
    /// memory to local memory. 0 if that is not possible, and for slices.
    pub spare_bytes: u64,
    /// File that contains the region.
    pub backing: RegionBacking,
}

impl Region {
    fn from_wire(region: wire::Region, backing: RegionBacking) -> Self {
        let wire::Region { slice, emc, epoch, bytes, offset, spare_bytes, .. } = region;
        Self { slice: slice.map(|slice| (slice, epoch)), emc, bytes, offset, spare_bytes, backing }
    }

    /// Returns the backing file, open for reading and writing.
    ///
    /// # Errors
    /// `NotFound` if the VMM must allocate the region itself, and the error returned by open(2).
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

/// Backing file of a region.
#[derive(Debug)]
pub enum RegionBacking {
    /// The open file of this descriptor.
    Descriptor(OwnedFd),
    /// The file at this path.
    Path(PathBuf),
    /// No backing file: the VMM must allocate the memory itself.
    VmmAllocated,
}

/// Error of a request to the host agent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed or the agent closed the connection.
    #[error("cannot {operation} the host agent")]
    Io {
        /// Description of the failed operation, such as "connect to".
        operation: &'static str,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The agent rejected the request.
    #[error("host agent rejected the request: {message} ({reason})")]
    Rejected {
        /// Machine-readable reason: VM_UNKNOWN (also for a VM of another user), NO_DESIRED_STATE,
        /// VM_NOT_READY, VM_ATTACHED, OTHER_VM, PEER_NOT_ALLOWED or BAD_MESSAGE. After
        /// NO_DESIRED_STATE (the agent has just started) and VM_NOT_READY, the same request may
        /// succeed later.
        reason: String,
        /// Human-readable explanation.
        message: String,
    },
    /// The path of the control socket cannot be sent to the agent.
    #[error("cannot send the control socket {} to the host agent: must be an absolute path in UTF-8", .0.display())]
    ControlSocket(PathBuf),
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
    /// [`ClientError::Io`] if no agent listens on the socket.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let connected = || -> io::Result<OwnedFd> {
            let client = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            connect(&client, &SocketAddrUnix::new(socket)?)?;
            let timeout = RESPONSE_TIMEOUT_DEFAULT.as_duration();
            set_socket_timeout(&client, Timeout::Recv, Some(timeout))?;
            set_socket_timeout(&client, Timeout::Send, Some(timeout))?;
            Ok(client)
        };
        connected().map(Self).map_err(io_error("connect to"))
    }

    /// Attaches this process to a VM and returns the VM's memory. A repeated call is allowed. The
    /// agent receives no control socket.
    ///
    /// # Errors
    /// [`ClientError`] if the agent does not reply, rejects the request or sends an invalid reply.
    pub fn attach(&self, vm: &str, form: wire::MemoryForm) -> Result<VmMemory, ClientError> {
        self.attach_with_control_socket(vm, form, None)
    }

    /// Attaches this process to a VM like [`Client::attach`]. `control_socket` is the absolute path
    /// of the socket on which this process serves the gRPC service `Vmm`.
    ///
    /// # Errors
    /// [`ClientError`] if the path is relative or not UTF-8, and the errors of [`Client::attach`].
    pub fn attach_with_control_socket(
        &self,
        vm: &str,
        form: wire::MemoryForm,
        control_socket: Option<&Path>,
    ) -> Result<VmMemory, ClientError> {
        let control_socket = control_socket.map_or(Ok(String::new()), control_socket_text)?;
        self.send(Request::Attach(wire::Attach { vm: vm.to_owned(), form: form.into(), control_socket }))?;
        self.receive_memory(VmMemory::add_attached_regions)
    }

    /// Returns the memory of a VM without attaching to the VM: the paths of its slices, and the
    /// size of its local memory.
    ///
    /// # Errors
    /// [`ClientError`], under the same conditions as [`Client::attach`].
    pub fn inspect(&self, vm: &str) -> Result<VmMemory, ClientError> {
        self.send(Request::Inspect(wire::Inspect { vm: vm.to_owned() }))?;
        self.receive_memory(VmMemory::add_inspected_regions)
    }

    fn receive_memory(
        &self,
        add: impl Fn(&mut VmMemory, Vec<wire::Region>, Vec<OwnedFd>) -> Result<(), ClientError>,
    ) -> Result<VmMemory, ClientError> {
        let mut memory = VmMemory { regions: Vec::new(), pinned: false };
        // Each message except the last contains at least one region: a slice or local memory.
        for _ in 0..SLICES_PER_VM_MAX + 2 {
            let (reply, descriptors) = self.receive()?;
            let Reply::Memory(part) = reply else { return Err(invalid_reply("expected a memory message")) };
            add(&mut memory, part.regions, descriptors)?;
            memory.pinned = part.pinned;
            if !part.more {
                return Ok(memory);
            }
        }
        Err(invalid_reply("more memory messages than a VM can have regions"))
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
            None => Err(invalid_reply("the reply is empty: must be memory or a rejection")),
        }
    }
}

impl VmMemory {
    /// Adds the regions of one reply to an attach request. `descriptors` are the backing files of
    /// the regions without a path, in order.
    fn add_attached_regions(
        &mut self,
        regions: Vec<wire::Region>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ClientError> {
        let mut descriptors = descriptors.into_iter();
        for region in regions {
            let next = || descriptors.next().map(RegionBacking::Descriptor);
            let backing = region_backing(&region)
                .or_else(next)
                .ok_or_else(|| invalid_reply("missing descriptor for a region"))?;
            self.regions.push(Region::from_wire(region, backing));
        }
        if descriptors.next().is_some() {
            Err(invalid_reply("more descriptors than regions"))
        } else {
            Ok(())
        }
    }

    /// Adds the regions of one reply to an inspect request. Such a reply has paths for slices, no
    /// backing for local memory, and no descriptors.
    fn add_inspected_regions(
        &mut self,
        regions: Vec<wire::Region>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ClientError> {
        for region in regions {
            let local = region.slice.is_none().then_some(RegionBacking::VmmAllocated);
            let backing =
                region_backing(&region).or(local).ok_or_else(|| invalid_reply("missing path for a slice"))?;
            self.regions.push(Region::from_wire(region, backing));
        }
        if descriptors.is_empty() {
            Ok(())
        } else {
            Err(invalid_reply("descriptors in the reply to an inspect request"))
        }
    }
}

/// Returns the path of a control socket as it is sent to the agent.
fn control_socket_text(path: &Path) -> Result<String, ClientError> {
    let text = path.to_str().filter(|_| path.is_absolute());
    text.map(str::to_owned).ok_or_else(|| ClientError::ControlSocket(path.to_owned()))
}

fn region_backing(region: &wire::Region) -> Option<RegionBacking> {
    (!region.path.is_empty()).then(|| RegionBacking::Path(region.path.clone().into()))
}
