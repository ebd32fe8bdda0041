use std::time::Instant;
use termwise_attention::*;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let name = args.get(1).map(String::as_str).unwrap_or("softmax rope=off");
    let variant: Variant = name.parse().unwrap();
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().unwrap();
    let only: usize = args.get(2).map_or(0, |x| x.parse().unwrap());
    let reps: usize = args.get(3).map_or(20, |x| x.parse().unwrap());
    let fwd = args.get(4).is_some();
    for (b, h, t) in [(8, 4, 256), (2, 4, 1024), (1, 8, 2048)] {
        if only != 0 && t != only {
            continue;
        }
        let d = 64;
        let shape = Shape { batch: b, time: t, heads: h, kv_heads: h, d, e: d };
        let heads = vec![variant.clone(); h];
        let mut f = Fused::new(&heads, shape, &Scratch::default()).unwrap();
        let rnd = |n: usize, seed: u64| {
            let mut s = seed;
            (0..n)
                .map(|_| {
                    let mut g = 0.0;
                    for _ in 0..4 {
                        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        g += ((s >> 40) as f32 / (1 << 24) as f32) - 0.5;
                    }
                    g * 1.7
                })
                .collect::<Vec<f32>>()
        };
        let n = b * t * h * d;
        let (q, k, v, dy) = (rnd(n, 1), rnd(n, 2), rnd(n, 3), rnd(n, 4));
        let rope = Rope::new(d, 10000.0, None).unwrap();
        let specs = layer_extras(&heads, &shape).unwrap();
        let lens: Vec<(Extra, usize)> = specs
            .iter()
            .map(|s| {
                (
                    s.extra,
                    match &s.source {
                        Source::Projection { outputs, .. } => b * t * outputs,
                        Source::Parameter { shape, .. } => shape.iter().product(),
                    },
                )
            })
            .collect();
        let vals: Vec<(Extra, Vec<f32>)> = lens.iter().map(|&(e, n)| (e, rnd(n, 9))).collect();
        let mut extras = Extras::default();
        for (e, v) in &vals {
            extras.set(*e, v.as_slice());
        }
        let inputs = Inputs { q: &q, k: &k, v: &v, extras, lengths: None, rope: &rope };
        let mut y = vec![0.0; n];
        let (mut dq, mut dk, mut dv) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        let mut gv: Vec<(Extra, Vec<f32>)> = lens.iter().map(|&(e, n)| (e, vec![0.0; n])).collect();
        let (mut bf, mut bb) = (f64::MAX, f64::MAX);
        let flops = 4.0 * (b * h * d) as f64 * (t * (t + 1) / 2) as f64;
        for _ in 0..reps {
            let s = Instant::now();
            f.forward(&inputs, &mut y).unwrap();
            let m = s.elapsed().as_secs_f64();
            bf = bf.min(m);
            if fwd {
                continue;
            }
            let mut ge = Extras::default();
            for (e, v) in gv.iter_mut() {
                ge.set(*e, v.as_mut_slice());
            }
            f.backward(&inputs, &dy, &mut Grads { q: &mut dq, k: &mut dk, v: &mut dv, extras: ge }).unwrap();
            bf = bf.min(m);
            bb = bb.min(s.elapsed().as_secs_f64());
        }
        println!(
            "{b} {h} {t}: fwd {:.3} ms {:.0} GF/s, fwd+bwd {:.3} ms {:.0} GF/s",
            bf * 1e3,
            flops / bf / 1e9,
            bb * 1e3,
            flops * 3.5 / bb / 1e9
        );
    }
}
