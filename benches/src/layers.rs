//! What five boxed layers cost: the price of stacks that are put together at run time.

use std::hint::black_box;
use std::pin::pin;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use dray_core::{Context, Fut};

use crate::alloc::{ThreadRole, counted};

/// As `FileSystem` and `OpenFile` are shaped: a reference, a context, a boxed future.
trait Layer: Send + Sync {
    fn read<'a>(&'a self, cx: &'a Context, at: u64) -> Fut<'a, u64>;
}

struct Bottom;

impl Layer for Bottom {
    fn read<'a>(&'a self, cx: &'a Context, at: u64) -> Fut<'a, u64> {
        Box::pin(async move { at + u64::from(cx.umask) })
    }
}

struct Through(Box<dyn Layer>);

impl Layer for Through {
    fn read<'a>(&'a self, cx: &'a Context, at: u64) -> Fut<'a, u64> {
        Box::pin(async move { self.0.read(cx, at).await ^ 1 })
    }
}

/// Figures of one call through five layers.
#[derive(Clone, Copy, Debug)]
pub struct LayerCost {
    /// Time of one call.
    pub time: Duration,
    /// Allocations of one call; counted only under the counting allocator.
    pub allocations: f64,
}

/// Calls five layers `calls` times.
pub fn five(calls: u32) -> LayerCost {
    let mut stack: Box<dyn Layer> = Box::new(Bottom);
    for _ in 1..5 {
        stack = Box::new(Through(stack));
    }
    let cx = Context::system();
    let mut task = TaskContext::from_waker(Waker::noop());
    let (allocations, begin) = (counted(ThreadRole::Other).0, Instant::now());
    for at in 0..calls {
        let mut future = pin!(black_box(&stack).read(&cx, u64::from(at)));
        if let Poll::Ready(value) = future.as_mut().poll(&mut task) {
            black_box(value);
        }
    }
    let calls = calls.max(1);
    LayerCost {
        time: begin.elapsed() / calls,
        allocations: (counted(ThreadRole::Other).0 - allocations) as f64 / f64::from(calls),
    }
}
