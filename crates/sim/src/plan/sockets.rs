//! Sockets with their free cores and memory, and the search for the socket of a VM.
//!
//! The sockets are grouped by their number of free cores. Each group is ordered by free memory and
//! number, and has a known largest free memory. A search reads one number per group, and then
//! searches the group that fits. Without a condition of the caller, its time grows with the cores of a
//! socket and with the logarithm of the number of sockets; with one, also with the number of sockets that
//! the caller does not accept.

use std::collections::BTreeSet;

use super::{Cluster, to_mib};

/// Free cores and memory of all sockets.
#[derive(Clone, Debug)]
pub struct Sockets {
    free: Vec<FreeResources>,
    /// Free memory and number of the sockets with a number of free cores, which is the index.
    by_free_cores: Vec<BTreeSet<(u64, u32)>>,
    /// Largest free memory of the sockets with a number of free cores; `None` without a socket.
    largest_free_mib: Vec<Option<u64>>,
}

/// Free cores and memory of one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreeResources {
    /// Number of free cores.
    cores: u32,
    /// Free memory in MiB.
    mib: u64,
}

impl Sockets {
    /// Creates the sockets of a cluster, without VMs.
    pub fn new(cluster: &Cluster) -> Self {
        let memory_mib = to_mib(cluster.memory_per_socket);
        let groups = cluster.cores_per_socket as usize + 1;
        let mut by_free_cores = vec![BTreeSet::new(); groups];
        by_free_cores[groups - 1] = (0..cluster.sockets).map(|socket| (memory_mib, socket)).collect();
        let mut largest_free_mib = vec![None; groups];
        largest_free_mib[groups - 1] = (cluster.sockets > 0).then_some(memory_mib);
        let free = FreeResources { cores: cluster.cores_per_socket, mib: memory_mib };
        Self { free: vec![free; cluster.sockets as usize], by_free_cores, largest_free_mib }
    }

    /// Returns the socket with enough free cores and memory that has the fewest free cores, then the
    /// least free memory, then the lowest number, among the sockets that `accepts` accepts. Returns
    /// `None` if no socket fits.
    pub fn best_fit(&self, cores: u32, mib: u64, accepts: impl Fn(u32) -> bool) -> Option<u32> {
        let groups = self.largest_free_mib.iter().zip(&self.by_free_cores).skip(cores as usize);
        let fitting = groups.filter(|(largest, _)| **largest >= Some(mib));
        let mut sockets = fitting.flat_map(|(_, group)| group.range((mib, 0)..).map(|(_, socket)| *socket));
        sockets.find(|socket| accepts(*socket))
    }

    /// Returns whether a VM fits on a socket. It does not fit on a socket that does not exist.
    pub fn fits(&self, socket: u32, cores: u32, mib: u64) -> bool {
        self.free.get(socket as usize).is_some_and(|free| free.cores >= cores && free.mib >= mib)
    }

    /// Allocates cores and memory of a socket.
    ///
    /// # Panics
    /// Panics if the VM does not fit on the socket.
    pub fn allocate(&mut self, socket: u32, cores: u32, mib: u64) {
        let free = self.free[socket as usize];
        let left = free.cores.checked_sub(cores).zip(free.mib.checked_sub(mib));
        let (cores, mib) = left.expect("the VM fits on the socket");
        self.set_free(socket, FreeResources { cores, mib });
    }

    /// Frees cores and memory that were allocated on a socket.
    pub fn free(&mut self, socket: u32, cores: u32, mib: u64) {
        let free = self.free[socket as usize];
        self.set_free(socket, FreeResources { cores: free.cores + cores, mib: free.mib + mib });
    }

    fn set_free(&mut self, socket: u32, free: FreeResources) {
        let old = std::mem::replace(&mut self.free[socket as usize], free);
        self.by_free_cores[old.cores as usize].remove(&(old.mib, socket));
        self.update_largest(old.cores);
        self.by_free_cores[free.cores as usize].insert((free.mib, socket));
        self.update_largest(free.cores);
    }

    fn update_largest(&mut self, cores: u32) {
        let largest = self.by_free_cores[cores as usize].last().map(|(mib, _)| *mib);
        self.largest_free_mib[cores as usize] = largest;
    }

    /// Returns the number of free cores of a socket.
    ///
    /// # Panics
    /// Panics if the socket does not exist.
    pub fn free_cores(&self, socket: u32) -> u32 {
        self.free[socket as usize].cores
    }
}
