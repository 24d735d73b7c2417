//! Load generator for memcached. Fills the cache, then requests Zipf-distributed keys one at a
//! time, and prints the number of replies every second.

use std::{
    error::Error,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Parser;
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

/// Request Zipf-distributed keys from memcached
#[derive(Debug, Parser)]
struct Args {
    /// Unix socket of memcached
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// Number of keys
    #[arg(long, value_name = "N")]
    keys: usize,
    /// Size of each value in bytes
    #[arg(long, value_name = "N")]
    value_bytes: usize,
    /// Exponent of the Zipf distribution; 0 is uniform
    #[arg(long, value_name = "S", default_value_t = 0.99)]
    skew: f64,
    /// Duration of the requests in seconds, after the cache is filled
    #[arg(long, value_name = "N")]
    seconds: u64,
    /// Pause after each value that fills the cache, in microseconds
    #[arg(long, value_name = "N", default_value_t = 0)]
    fill_pause_us: u64,
    /// Do not fill the cache
    #[arg(long)]
    is_full: bool,
}

/// Connection to memcached.
struct MemcachedClient {
    read: BufReader<UnixStream>,
    write: UnixStream,
    line: String,
    value: Vec<u8>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let write = UnixStream::connect(&args.socket)?;
    let read = BufReader::new(write.try_clone()?);
    let mut memcached = MemcachedClient { read, write, line: String::new(), value: Vec::new() };
    if !args.is_full {
        memcached.fill(args.keys, args.value_bytes, Duration::from_micros(args.fill_pause_us))?;
        println!("filled with {} keys of {} bytes", args.keys, args.value_bytes);
    }
    let zipf = Zipf::new(args.keys, args.skew);
    let mut rng = Pcg64Mcg::seed_from_u64(1);
    let end = Instant::now() + Duration::from_secs(args.seconds);
    while Instant::now() < end {
        let (mut hits, mut misses) = (0_u32, 0_u32);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            if memcached.get(zipf.sample_key(&mut rng))? { hits += 1 } else { misses += 1 }
        }
        println!("{:.0} hits/s, {misses} misses", f64::from(hits) / start.elapsed().as_secs_f64());
    }
    Ok(())
}

impl MemcachedClient {
    fn fill(&mut self, keys: usize, bytes: usize, pause: Duration) -> io::Result<()> {
        let value = vec![b'v'; bytes];
        for key in 0..keys {
            write!(self.write, "set key{key} 0 0 {bytes}\r\n")?;
            self.write.write_all(&value)?;
            self.write.write_all(b"\r\n")?;
            if self.read_reply()? != "STORED\r\n" {
                return Err(io::Error::other(format!("key {key}: {}", self.line)));
            }
            std::thread::sleep(pause);
        }
        Ok(())
    }

    /// Requests a key and returns whether memcached has a value for this key.
    fn get(&mut self, key: usize) -> io::Result<bool> {
        write!(self.write, "get key{key}\r\n")?;
        let Some(bytes) =
            self.read_reply()?.trim().strip_prefix("VALUE ").and_then(|rest| rest.rsplit(' ').next())
        else {
            return Ok(false);
        };
        let bytes: usize = bytes.parse().map_err(io::Error::other)?;
        self.value.resize(bytes + "\r\nEND\r\n".len(), 0);
        self.read.read_exact(&mut self.value)?;
        Ok(true)
    }

    fn read_reply(&mut self) -> io::Result<&str> {
        self.line.clear();
        match self.read.read_line(&mut self.line)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "memcached closed the connection")),
            _ => Ok(&self.line),
        }
    }
}

/// Zipf distribution of keys. Popular keys are spread over all key numbers.
struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(keys: usize, skew: f64) -> Self {
        let mut sum = 0.0;
        let cumulative = (1..=keys).map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        });
        Self { cumulative: cumulative.collect() }
    }

    fn sample_key(&self, rng: &mut Pcg64Mcg) -> usize {
        let at = rng.random_range(0.0..self.cumulative[self.cumulative.len() - 1]);
        let rank = self.cumulative.partition_point(|sum| *sum <= at);
        // Multiplication by a large odd number spreads popular keys over all key numbers.
        rank.wrapping_mul(2_654_435_761) % self.cumulative.len()
    }
}
