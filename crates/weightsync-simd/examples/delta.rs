use std::hint::black_box;
use std::time::Instant;
use weightsync_simd::*;
fn main(){
 let n=256usize<<20;
 let mut s=1u64;
 let mut rnd=||{s^=s<<13;s^=s>>7;s^=s<<17;s};
 let mut old=vec![0u8;n]; for c in old.chunks_exact_mut(8){c.copy_from_slice(&rnd().to_le_bytes())}
 let mut cp=vec![1u8;n];
 for d in [0.0002,0.006,0.011,0.03,0.1,0.33,0.9]{
  let mut new=old.clone();
  let t=(d*4294967296.0) as u64;
  for c in new.chunks_exact_mut(2){ if (rnd()>>32)<t {c[0]=c[0].wrapping_add(1)}}
  let mut masks=vec![0u64;1024];let mut pl=vec![0u16;BLOCK+SLACK];let mut st=vec![0u16;BLOCK+SLACK];
  let mut a=vec![];let mut b=vec![];let mut e=vec![];
  for _ in 0..7{
   let i=Instant::now(); cp.copy_from_slice(black_box(&old)); let m=i.elapsed().as_secs_f64();
   let i=Instant::now(); let mut k=0; let bl: usize=std::env::var("BL").unwrap().parse().unwrap(); for (o,w) in old.chunks(bl*2).zip(new.chunks(bl*2)){k+=compare::<u16>(o,w,&mut masks,&mut pl,&mut st);} black_box(k); let c=i.elapsed().as_secs_f64();
   let i=Instant::now(); stream_copy_slice(&mut cp,black_box(&old)); let nt=i.elapsed().as_secs_f64();
   a.push(c/m); b.push(n as f64/m/1e9); e.push(nt/m);
  }
  for v in [&mut a,&mut b,&mut e]{v.sort_by(f64::total_cmp)}
  println!("{d}: compare {:.2} memcpy {:.1} GB/s nt {:.2}",a[3],b[3],e[3]);
 }
}
