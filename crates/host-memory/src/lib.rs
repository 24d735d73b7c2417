//! A VMM's way to the memory of its VM: the caller's end of a host agent's socket, blocking. A room of its own, as the agent,
//! the command line and the VMM do not look into each other. What is done with the memory is the caller's business.

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

/// A connection to the agent of this host.
#[derive(Debug)]
pub struct Client(OwnedFd);

/// The memory of a VM.
#[derive(Debug)]
pub struct VmMemory {
    /// Local memory first, then slices in order.
    pub regions: Vec<Region>,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
}

/// One region of a VM's memory.
#[derive(Debug)]
pub struct Region {
    /// Which slice, and which of its owners this VM is; `None` for local memory.
    pub slice: Option<(u32, u64)>,
    /// Of which EMC; empty for local memory.
    pub emc: String,
    /// How long it is.
    pub bytes: u64,
    /// Where it starts in its place.
    pub offset: u64,
    /// Where it is.
    pub place: RegionPlace,
}

impl Region {
    fn of(region: wire::Region, place: RegionPlace) -> Self {
        let wire::Region { slice, emc, epoch, bytes, offset, .. } = region;
        Self { slice: slice.map(|slice| (slice, epoch)), emc, bytes, offset, place }
    }

    /// What the region lies in, open for reading and writing.
    ///
    /// # Errors
    /// A path that cannot be opened, or nothing to open.
    pub fn into_file(self) -> io::Result<File> {
        match self.place {
            RegionPlace::Descriptor(descriptor) => Ok(File::from(descriptor)),
            RegionPlace::Path(path) => OpenOptions::new().read(true).write(true).open(path),
            RegionPlace::VmmsOwn => Err(io::Error::new(io::ErrorKind::NotFound, "it is the VMM's to make")),
        }
    }
}

/// Where a region is.
#[derive(Debug)]
pub enum RegionPlace {
    /// In what this descriptor refers to.
    Descriptor(OwnedFd),
    /// In the file of this name.
    Path(PathBuf),
    /// Nowhere: the VMM makes it.
    VmmsOwn,
}

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody is there, or not any more.
    #[error("{doing} the host agent")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// Why it did not work.
        #[source]
        errno: io::Error,
    },
    /// The agent said no.
    #[error("the host agent refuses: {message} ({reason})")]
    Refused {
        /// In upper case with underscores: VM_UNKNOWN, VM_NOT_READY, VM_ATTACHED, OTHER_USER, OTHER_VM,
        /// PEER_NOT_ALLOWED, BAD_MESSAGE.
        reason: String,
        /// For people.
        message: String,
    },
    /// The answer is not one.
    #[error("the host agent's answer is wrong: {0}")]
    Wrong(String),
}

fn io_error(doing: &'static str) -> impl FnOnce(io::Error) -> ClientError {
    move |errno| ClientError::Io { doing, errno }
}

fn wrong(what: impl Into<String>) -> ClientError {
    ClientError::Wrong(what.into())
}

impl Client {
    /// Connects to an agent's socket.
    ///
    /// # Errors
    /// Nobody listens there.
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

    /// Fetches the memory of a VM, which becomes this process's. May be repeated.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn attach(&self, vm: &str, form: wire::MemoryForm) -> Result<VmMemory, ClientError> {
        self.send(Request::Attach(wire::Attach { vm: vm.to_owned(), form: form.into() }))?;
        self.memory(VmMemory::add)
    }

    /// Looks at the memory of a VM: slices as paths, and how much local memory it is to have. Nobody is registered.
    ///
    /// # Errors
    /// [`ClientError`], whenever [`Client::attach`] would have failed.
    pub fn look(&self, vm: &str) -> Result<VmMemory, ClientError> {
        self.send(Request::Look(wire::Look { vm: vm.to_owned() }))?;
        self.memory(VmMemory::add_shown)
    }

    fn memory(
        &self,
        add: impl Fn(&mut VmMemory, Vec<wire::Region>, Vec<OwnedFd>) -> Result<(), ClientError>,
    ) -> Result<VmMemory, ClientError> {
        let mut memory = VmMemory { regions: Vec::new(), pinned: false };
        // Every message but the last brings a region, and there is one for local memory.
        for _ in 0..SLICES_PER_VM_MAX + 2 {
            let (reply, descriptors) = self.receive()?;
            let Reply::Memory(piece) = reply else { return Err(wrong("it is not about memory")) };
            add(&mut memory, piece.regions, descriptors)?;
            memory.pinned = piece.pinned;
            if !piece.more {
                return Ok(memory);
            }
        }
        Err(wrong("it does not end"))
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
        let received = datagram::receive_descriptors(&self.0, &mut buffer).map_err(io_error("hear from"))?;
        let (bytes, descriptors) = received.ok_or_else(|| wrong("it does not fit into a datagram"))?;
        if bytes == 0 {
            return Err(io_error("hear from")(io::ErrorKind::UnexpectedEof.into()));
        }
        let reply =
            wire::HostMemoryReply::decode(&buffer[..bytes]).map_err(|error| wrong(error.to_string()))?;
        match reply.reply {
            Some(Reply::Refused(wire::Refused { reason, message })) => {
                Err(ClientError::Refused { reason, message })
            }
            Some(reply) => Ok((reply, descriptors)),
            None => Err(wrong("it is empty")),
        }
    }
}

impl VmMemory {
    /// The descriptors of a message belong to its regions in order, those with a path excepted.
    fn add(&mut self, regions: Vec<wire::Region>, descriptors: Vec<OwnedFd>) -> Result<(), ClientError> {
        let mut descriptors = descriptors.into_iter();
        for region in regions {
            let next = || descriptors.next().map(RegionPlace::Descriptor);
            let place = path_of(&region).or_else(next).ok_or_else(|| wrong("a descriptor is missing"))?;
            self.regions.push(Region::of(region, place));
        }
        if descriptors.next().is_some() { Err(wrong("a descriptor is too many")) } else { Ok(()) }
    }

    /// Slices have paths, local memory is nowhere yet, and nothing has a descriptor.
    fn add_shown(
        &mut self,
        regions: Vec<wire::Region>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ClientError> {
        for region in regions {
            let own = region.slice.is_none().then_some(RegionPlace::VmmsOwn);
            let place = path_of(&region).or(own).ok_or_else(|| wrong("a path is missing"))?;
            self.regions.push(Region::of(region, place));
        }
        if descriptors.is_empty() { Ok(()) } else { Err(wrong("a descriptor is too many")) }
    }
}

fn path_of(region: &wire::Region) -> Option<RegionPlace> {
    (!region.path.is_empty()).then(|| RegionPlace::Path(region.path.clone().into()))
}
