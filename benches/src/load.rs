//! Closed-loop clients: each client sends a request, waits for the reply, and repeats. A [`Writer`]
//! defines the requests, so that the same loop can load different servers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;

use crate::{
    disk::{new_histogram_us, record_duration},
    failure::Failure,
};

/// Client of a server with durable writes.
pub trait Writer: Send + 'static {
    /// Sends the request for write `number` of this load, counted from 0, and waits for the reply.
    fn write(&mut self, number: u64) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// Limits of a load. The load ends when the first limit is reached.
#[derive(Clone, Copy, Debug)]
pub struct LoadLimits {
    /// Maximum duration of the load.
    pub duration_max: Duration,
    /// Maximum number of writes of all clients.
    pub writes_max: u64,
}

/// Result of a load.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Number of completed writes.
    pub writes: u64,
    /// Time from the first request to the last reply.
    pub elapsed: Duration,
    /// Latency of each write, in microseconds.
    pub latencies_us: Histogram<u64>,
}

impl Outcome {
    /// Returns the number of completed writes per second.
    pub fn writes_per_second(&self) -> f64 {
        self.latencies_us.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// Returns a quantile of the latency, in microseconds. `quantile` ranges from 0 to 1.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latencies_us.value_at_quantile(quantile) as f64
    }
}

/// Runs all writers concurrently until a limit is reached. Returns the outcome and the writers.
///
/// # Errors
/// The first [`Failure`] that a writer returns.
pub async fn run<W: Writer>(writers: Vec<W>, limits: LoadLimits) -> Result<(Outcome, Vec<W>), Failure> {
    let (start, next) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for writer in writers {
        clients.spawn(run_client(writer, Arc::clone(&next), start + limits.duration_max, limits.writes_max));
    }
    let (mut latencies_us, mut writers) = (new_histogram_us(), Vec::new());
    while let Some(result) = clients.join_next().await {
        let (writer, times) = result.expect("a client does not panic and is not cancelled")?;
        latencies_us.add(times).expect("all histograms have the same range and precision");
        writers.push(writer);
    }
    Ok((Outcome { writes: latencies_us.len(), elapsed: start.elapsed(), latencies_us }, writers))
}

async fn run_client<W: Writer>(
    mut writer: W,
    next: Arc<AtomicU64>,
    end: Instant,
    writes_max: u64,
) -> Result<(W, Histogram<u64>), Failure> {
    let mut times = new_histogram_us();
    loop {
        let start = Instant::now();
        if start >= end {
            break;
        }
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= writes_max {
            break;
        }
        writer.write(number).await?;
        record_duration(&mut times, start.elapsed());
    }
    Ok((writer, times))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct CountingWriter(Vec<u64>);

    impl Writer for CountingWriter {
        async fn write(&mut self, number: u64) -> Result<(), Failure> {
            self.0.push(number);
            tokio::task::yield_now().await;
            Ok(())
        }
    }

    #[tokio::test]
    async fn writes_are_executed_and_counted_once() {
        let writers = (0..7).map(|_| CountingWriter(Vec::new())).collect();
        let limits = LoadLimits { duration_max: Duration::from_secs(600), writes_max: 1000 };
        let (outcome, writers) = run(writers, limits).await.unwrap();
        let mut numbers: Vec<u64> = writers.into_iter().flat_map(|writer| writer.0).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
        assert_eq!((outcome.writes, outcome.latencies_us.len()), (1000, 1000));
    }

    struct RejectedWriter;

    impl Writer for RejectedWriter {
        async fn write(&mut self, number: u64) -> Result<(), Failure> {
            Err(Failure::UnexpectedReply { subject: format!("write {number}"), reply: "no".to_owned() })
        }
    }

    #[tokio::test]
    async fn rejected_write_fails_the_load() {
        let limits = LoadLimits { duration_max: Duration::from_secs(600), writes_max: 10 };
        assert!(run(vec![RejectedWriter], limits).await.is_err());
    }
}
